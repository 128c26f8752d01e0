import pytest

from wildflower.client_app.node_config import read_node_config


def test_a_node_config_is_read_as_flower_reads_it():
    assert read_node_config('partition-id=0 kind="two words" share=0.5') == {
        "partition-id": 0,
        "kind": "two words",
        "share": 0.5,
    }
    assert read_node_config("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partition-id=1 data-dir=/srv/photos", """a text would be 'data-dir="/srv/photos"'"""),
        ("partition-id=1 kind=", "'kind=' is no key=value"),
        ("data-dir=/my photos", "'photos' is no key=value; a text with spaces stands in double quotes"),
        ("kind=board7.2", """a text would be 'kind="board7.2"'"""),
        ("bandwidth-insecure=True", "'bandwidth-insecure=True' is neither a number, nor true or false"),
        ("partition-id=1 partition-id=2", "the key 'partition-id' is there twice"),
    ],
)
def test_the_pair_at_fault_is_named_in_one_line(text, words):
    with pytest.raises(ValueError, match="node config") as refused:
        read_node_config(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
