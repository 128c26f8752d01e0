"""A node that trusts some signatures runs no app without one of them."""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from wildflower.client_app.signed_app import MANIFEST, SIGNATURE, app_digest, is_signed, taking_submitted, verifying
from wildflower.launch.bundle import make_bundle
from wildflower.launch.experiment import sign
from wildflower.launch.experiment_file import SettingsError
from wildflower.plugins.beside import APP

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signing") / "secrets"
    subprocess.run([DEPLOY / "certs", "--out", folder, "--nodes", "1"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def trusted(secrets):
    return yaml.safe_load((secrets / "trusted.yaml").read_text())


@pytest.fixture(scope="module")
def app(secrets, tmp_path_factory):
    """The bundle of a signed app, as Flower makes it of the folder that is submitted."""
    folder = make_bundle(APP, tmp_path_factory.mktemp("app") / "app", "heterofl", {})
    sign(folder, secrets / "app.key")
    return build_fab_from_disk(folder)


def changed(app, change):
    """A bundle whose files, a dict of their contents, were changed; `change` may return more of them."""
    with zipfile.ZipFile(io.BytesIO(app)) as bundle:
        files = {name: bundle.read(name) for name in bundle.namelist()}
    more = change(files) or []
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as bundle:
        for name, content in [*files.items(), *more]:
            bundle.writestr(name, content)
    return found.getvalue()


def test_a_signed_app_is_taken(app, trusted):
    assert is_signed(app, trusted)
    assert is_signed(changed(app, lambda files: None), trusted)  # compressed in another way


CODE = "wildflower/client_app/app.py"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda files: files.update({CODE: files[CODE] + b"\nprint(1)"}), "was changed since"),
        (lambda files: files.update({"more.py": b""}), "was changed since"),
        (lambda files: files.update({"pyproject.toml": files["pyproject.toml"] + b"\n"}), "was changed since"),
        (lambda files: files.pop(CODE) and None, "was changed since"),
        (lambda files: [(CODE, b"print(1)")], "two files of one name"),
        (lambda files: files.pop(SIGNATURE) and None, "has no signature"),
        (lambda files: files.update({SIGNATURE: b"signature = 3"}), "cannot be read"),
        (lambda files: files.update({SIGNATURE: b"signature = '*'"}), "cannot be read"),
        (lambda files: files.update({SIGNATURE: b"#" * 2000}), "more than 1000 bytes"),
        (lambda files: files.update({SIGNATURE: b"signature = " + b"[" * 900}), "cannot be read"),
        (lambda files: files.update({"zeros": bytes(2**26)}), "more than"),
    ],
)
def test_an_app_that_was_changed_is_not_taken(app, trusted, change, told, caplog):
    assert not is_signed(changed(app, change), trusted)
    assert told in caplog.text


def test_flowers_list_of_files_is_not_what_is_signed(app):
    assert app_digest(changed(app, lambda files: files.update({MANIFEST: b""}))) == app_digest(app)


def test_another_key_and_no_bundle_are_not_taken(app, tmp_path, caplog):
    subprocess.run([DEPLOY / "certs", "--out", tmp_path / "other", "--nodes", "1"], check=True, capture_output=True)
    assert not is_signed(app, yaml.safe_load((tmp_path / "other" / "trusted.yaml").read_text()))
    assert not is_signed(b"PK", {})
    assert "BadZipFile" in caplog.text


def test_a_bundle_whose_compression_is_damaged_is_not_taken(trusted, caplog):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("a.py", b"a" * 1000)
    damaged = bytearray(file.getvalue())
    damaged[34] = 0xFF  # the first byte of the compressed file
    assert not is_signed(bytes(damaged), trusted)
    assert "cannot be read" in caplog.text


def pulled(pull, app, trusted, monkeypatch):
    """The errors with which a node answers the first message of a run with this app."""
    for name, value in {"_run_id": 7, "_task_id": 1, "_node_id": 2}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    message = Message(RecordDict({"weights": ArrayRecord()}), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = message.object_id
    message.metadata.__dict__["_run_id"] = 7
    state = NodeStateFactory(ObjectStoreFactory()).state()
    state.set_node_id(1)
    pull(
        state=state,
        object_store=ObjectStoreFactory().store(),
        node_config={},
        receive=lambda: (message, get_object_tree(message)),
        get_run=lambda run_id: Run.create_empty(run_id),
        get_fab=lambda fab_hash, run_id: Fab(hashlib.sha256(app).hexdigest(), app, {}),
        pull_object=lambda run_id, object_id: b"",
        confirm_message_received=lambda run_id, message_id: None,
        trusted_entities=trusted,
    )
    return [reply.error.reason for reply in state.get_messages_legacy(is_reply=True)]


def test_flower_refuses_every_app_that_is_submitted_and_ours_one_that_is_not_signed(app, trusted, monkeypatch):
    """If Flower takes a signed one, it has learned to: see docs/newer-flower.md."""
    flowers = start_client_internal._pull_and_store_message
    refused = pulled(flowers, app, trusted, monkeypatch)
    assert len(refused) == 1
    monkeypatch.setattr(start_client_internal, "_verify_fab", verifying(start_client_internal._verify_fab))
    assert pulled(taking_submitted(flowers), app, trusted, monkeypatch) == []
    unsigned = changed(app, lambda files: files.update({"more.py": b""}))
    assert pulled(taking_submitted(flowers), unsigned, trusted, monkeypatch) == refused


def test_another_kind_of_key_signs_nothing(secrets, tmp_path):
    wrong = [(secrets / "nodes" / "node-0", "expected an Ed25519 key"), (secrets / "ca.crt", "--sign")]
    for key, told in (*wrong, (secrets / "none", "No such file")):
        with pytest.raises(SettingsError, match=told):
            sign(tmp_path, key)
