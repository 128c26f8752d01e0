import platform
import resource
import sys
from types import SimpleNamespace

import psutil
import pytest

from wildflower.devices import probe
from wildflower.devices.probe import board_kind, probe_machine

GB = 10**9
V1_UNLIMITED = "9223372036854771712"


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host of 16 GB (12 free), 8 CPUs, no limit on address space and no CUDA, whatever runs the tests."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GB, available=12 * GB))
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))


@pytest.fixture
def tree(tmp_path):
    """Writes files under a root of its own: tree({"proc/self/cgroup": text, ...}) -> root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {group} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {group} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
V2_MOUNTS = "31 23 0:28 {group} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"


def v1(group_seen, group_mounted, files):
    memory = {f"sys/fs/cgroup/memory/{name}": text for name, text in files.items() if "memory" in name}
    cpu = {f"sys/fs/cgroup/cpu,cpuacct/{name}": text for name, text in files.items() if "cpu." in name}
    return {
        "proc/self/cgroup": f"5:memory:{group_seen}\n1:cpu,cpuacct:{group_seen}\n2:name=systemd:/init.scope\n",
        "proc/self/mountinfo": V1_MOUNTS.format(group=group_mounted),
        **memory,
        **cpu,
    }


def v2(group_seen, group_mounted, files):
    return {
        "proc/self/cgroup": f"0::{group_seen}\n",
        "proc/self/mountinfo": V2_MOUNTS.format(group=group_mounted),
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }


def figures(report):
    return report.memory_total_bytes, report.memory_available_bytes, report.cpus


def test_without_limits_the_host_is_reported(tmp_path):
    report = probe_machine(tmp_path)
    assert figures(report) == (16 * GB, 12 * GB, 8)
    assert report.accelerator is report.down_mbit_per_s is report.up_mbit_per_s is report.flop_per_s is None


def test_version_1_in_a_container_that_sees_the_hosts_path(tree):
    # Docker: the process's group is named from the host, the mounted folder is that group itself.
    files = {
        "memory.limit_in_bytes": "4000000000\n",
        "memory.usage_in_bytes": "1500000000\n",
        "memory.stat": "active_file 1\ninactive_file 1\ntotal_active_file 100000000\ntotal_inactive_file 400000000\n",
        "cpu.cfs_quota_us": "150000\n",
        "cpu.cfs_period_us": "100000\n",
    }
    root = tree(v1("/docker/abc", "/docker/abc", files))
    # 1.5 GB are used, 0.5 of them cache that the kernel gives back.
    assert figures(probe_machine(root)) == (4 * GB, 3 * GB, 1.5)


def test_version_1_without_limits(tree):
    files = {"memory.limit_in_bytes": V1_UNLIMITED, "memory.usage_in_bytes": "5", "cpu.cfs_quota_us": "-1"}
    assert figures(probe_machine(tree(v1("/", "/", files | {"cpu.cfs_period_us": "100000"})))) == (16 * GB, 12 * GB, 8)


def test_version_1_nested_groups_all_limit(tree):
    files = {
        "node/memory.limit_in_bytes": "8000000000",
        "node/memory.usage_in_bytes": "7000000000",
        "node/app/memory.limit_in_bytes": "4000000000",
        "node/app/memory.usage_in_bytes": "1000000000",
        "memory.limit_in_bytes": V1_UNLIMITED,
        "memory.usage_in_bytes": "9000000000",
    }
    # The inner group sets the total, but its siblings have used up the outer one: 1 GB is left of 8.
    assert figures(probe_machine(tree(v1("/node/app", "/", files)))) == (4 * GB, 1 * GB, 8)


def test_version_2_in_a_container(tree):
    files = {
        "memory.max": "2000000000\n",
        "memory.current": "900000000\n",
        "memory.stat": "anon 800000000\ninactive_file 60000000\nactive_file 30000000\n"
        "slab_reclaimable 10000000\nslab_unreclaimable 5000000\nactive_anon 700000000\n",
        "cpu.max": "50000 100000\n",
    }
    assert figures(probe_machine(tree(v2("/", "/", files)))) == (2 * GB, int(1.2 * GB), 0.5)


def test_version_2_says_max_where_nothing_limits(tree):
    files = {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/cpu.max": "max 100000\n"}
    assert figures(probe_machine(tree(v2("/a", "/", files)))) == (16 * GB, 12 * GB, 8)


def test_version_2_nested_groups_all_limit(tree):
    files = {
        "user/memory.max": "3000000000",
        "user/memory.current": "500000000",
        "user/run/memory.max": "max",
        "user/run/memory.current": "400000000",
        "user/cpu.max": "400000 100000",
        "user/run/cpu.max": "200000 100000",
    }
    assert figures(probe_machine(tree(v2("/user/run", "/", files)))) == (3 * GB, int(2.5 * GB), 2)


def test_a_group_inside_the_mounted_one_is_found(tree):
    files = {"memory.max": "8000000000", "memory.current": "0", "inner/memory.max": "1000000000"}
    root = tree(v2("/docker/abc/inner", "/docker/abc", files | {"inner/memory.current": "0"}))
    assert figures(probe_machine(root))[:2] == (1 * GB, 1 * GB)


def test_a_group_beside_this_process_limits_nothing(tree):
    files = {"other/memory.max": "1000", "other/memory.current": "0"}
    assert figures(probe_machine(tree(v2("/mine", "/", files))))[:2] == (16 * GB, 12 * GB)


def test_a_group_whose_name_only_begins_like_the_mounted_one_is_not_inside(tree):
    files = {"data/memory.max": "1000", "data/memory.current": "0"}
    assert figures(probe_machine(tree(v2("/appdata", "/app", files))))[:2] == (16 * GB, 12 * GB)


def test_memory_that_is_used_beyond_its_limit_leaves_nothing(tree):
    files = {"memory.max": "1000", "memory.current": "1500"}
    assert figures(probe_machine(tree(v2("/", "/", files))))[:2] == (1000, 0)


@pytest.mark.parametrize(("which", "free"), [(resource.RLIMIT_AS, 1 * GB), (resource.RLIMIT_DATA, 2 * GB)])
def test_the_limits_on_address_space_and_data_count(which, free, tmp_path, monkeypatch):
    limits = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_DATA), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "getrlimit", (limits | {which: (3 * GB, resource.RLIM_INFINITY)}).__getitem__)
    info = SimpleNamespace(vms=2 * GB, data=1 * GB)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: info))
    assert figures(probe_machine(tmp_path))[:2] == (3 * GB, free)


def zones(*temperatures):
    return {f"sys/class/thermal/thermal_zone{i}/temp": text for i, text in enumerate(temperatures)}


def test_the_hottest_sensor_that_can_be_read_is_reported(tree, tmp_path):
    assert probe_machine(tmp_path).temperature_celsius is None
    root = tree(zones("48312\n", "61000\n", "-273000\n", "255000\n", "", "off"))
    (root / "sys/class/thermal/thermal_zone9").mkdir()
    assert probe_machine(root).temperature_celsius == 61.0


@pytest.mark.parametrize(
    ("word", "throttled"), [("0", False), ("50000\n", False), ("50005\n", True), ("0x4", True), ("8", True)]
)
def test_a_raspberry_pi_says_whether_it_is_throttled_now(tree, word, throttled):
    # 0x50000: it was, since the last start, and is not now.
    for soc in ("soc", "soc@107c000000"):  # of a Raspberry Pi 4 and 5
        files = {f"sys/devices/platform/{soc}/{soc}:firmware/get_throttled": word}
        assert probe_machine(tree(files)).throttled is throttled


def test_a_firmware_that_does_not_answer_is_no_problem(tree):
    assert probe_machine(tree({"sys/devices/platform/soc/soc:firmware/get_throttled": ""})).throttled is None


@pytest.mark.parametrize(
    ("devices", "throttled"),
    [
        ([], None),
        ([("pwm-fan", "3")], None),
        ([("pwm-fan", "3"), ("cpufreq-cpu0", "0")], False),
        ([("thermal-cpufreq-0", "0"), ("thermal-cpufreq-1", "2")], True),
        ([("Processor", "0"), ("Processor", "")], False),
    ],
)
def test_the_kernel_says_whether_it_slows_the_processor_down(tree, devices, throttled):
    files = {}
    for number, (kind, state) in enumerate(devices):
        folder = f"sys/class/thermal/cooling_device{number}"
        files |= {f"{folder}/type": kind + "\n", f"{folder}/cur_state": state}
    assert probe_machine(tree(files)).throttled is throttled


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("memory.max", "lots", "expected a number of bytes or 'max'"),
        ("cpu.max", "50000", "expected two numbers above 0"),
        ("cpu.max", "50000 0", "expected two numbers above 0"),
        ("cpu.max", "", "expected two numbers above 0"),
    ],
)
def test_a_limit_that_the_kernel_does_not_write_is_named(tree, name, text, right):
    root = tree(v2("/", "/", {name: text}))
    with pytest.raises(ValueError, match=right) as error:
        probe_machine(root)
    assert "sys/fs/cgroup" in str(error.value)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("Raspberry Pi 4 Model B Rev 1.2\0", "raspberry-pi-4"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3\0", "raspberry-pi-3"),
        ("Raspberry Pi Compute Module 4 Rev 1.0\0", "raspberry-pi-compute-module-4"),
        ("NVIDIA Jetson Nano Developer Kit\0", "jetson-nano"),
        ("NVIDIA Jetson Orin Nano Developer Kit\0", "jetson-orin-nano"),
        ("NVIDIA Jetson Xavier NX Developer Kit\0", "jetson-xavier-nx"),
    ],
)
def test_boards_by_their_model(tree, model, kind):
    assert board_kind(tree({"proc/device-tree/model": model})) == kind


def test_a_jetson_by_its_chip_where_the_model_is_a_code_name(tree):
    files = {"model": "quill\0", "compatible": "nvidia,p2597-0000+p3310-1000\0nvidia,quill\0nvidia,tegra186\0"}
    assert board_kind(tree({f"proc/device-tree/{name}": text for name, text in files.items()})) == "jetson-tx2"


@pytest.mark.parametrize(("machine", "kind"), [("x86_64", "x86-64"), ("aarch64", "aarch64"), ("", "unknown")])
def test_other_machines_by_their_processor(tree, monkeypatch, machine, kind):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    root = tree({"proc/device-tree/model": "Rockchip RK3588 EVB\0", "proc/device-tree/compatible": "rockchip,rk3588\0"})
    assert board_kind(root) == kind


def torch_with_cuda(name, *, integrated):
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(name=name, is_integrated=integrated),
            mem_get_info=lambda: (20 * GB, 24 * GB),
        )
    )


def test_a_card_with_memory_of_its_own_is_where_training_happens(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_with_cuda("NVIDIA L4", integrated=0))
    report = probe_machine(tmp_path)
    assert figures(report) == (24 * GB, 20 * GB, 8)
    assert report.accelerator == "NVIDIA L4"
    assert not report.memory_is_ram


@pytest.mark.parametrize(("model", "integrated"), [("NVIDIA Jetson Nano Developer Kit\0", 0), ("Other board\0", 1)])
def test_a_gpu_that_shares_the_ram_reports_the_ram(tree, monkeypatch, model, integrated):
    monkeypatch.setitem(sys.modules, "torch", torch_with_cuda("NVIDIA Tegra X1", integrated=integrated))
    report = probe_machine(tree({"proc/device-tree/model": model}))
    assert figures(report) == (16 * GB, 12 * GB, 8)
    assert report.accelerator == "NVIDIA Tegra X1"
    assert report.memory_is_ram


@pytest.mark.parametrize(
    ("driver", "imported"), [("dev/nvidiactl", True), ("dev/nvhost-ctrl-gpu", True), ("dev/tty", False)]
)
def test_torch_is_imported_only_where_the_driver_is(tree, monkeypatch, driver, imported):
    monkeypatch.delitem(sys.modules, "torch")
    found = []

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                found.append(name)
                raise ImportError("torch was asked for")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    if imported:
        with pytest.raises(ImportError, match="torch was asked for"):
            probe_machine(tree({driver: ""}))
    else:
        assert probe_machine(tree({driver: ""})).accelerator is None
    assert found == ["torch"] * imported


def test_the_machine_that_runs_this_test_reports_itself(monkeypatch):
    monkeypatch.undo()
    report = probe_machine()
    assert 0 < report.memory_available_bytes <= report.memory_total_bytes
    assert report.cpus > 0
