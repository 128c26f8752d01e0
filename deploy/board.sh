# shellcheck shell=bash
# What the scripts of all boards share. They set `board`, `python` (the words that start the node's Python), `check_board`,
# `install_software`, `node_command` and `remove_software`, where the board's GPU can train `install_gpu`, `remove_gpu` and
# `gpu_config`, and call `main "$@"`.

: "${board:?set by the script of the board}" "${python[0]:?set by the script of the board}"
keys=/etc/wildflower
state=/var/lib/wildflower
unit=/etc/systemd/system/wildflower-node.service

stop() { echo "$board: $*" >&2; exit 1; }

# Do something, or with --dry-run only say it.
act() {
    if [ -n "$dry_run" ]; then
        printf '+'; printf ' %q' "$@"; printf '\n'
    else
        "$@"
    fi
}

# Write standard input to a file, or with --dry-run show it.
write() {
    if [ -n "$dry_run" ]; then
        echo "+ write $1:"; sed 's/^/    /'
    else
        cat >"$1"
    fi
}

# Start a service now and whenever the board does; one that runs begins anew, with what was installed.
start() {
    act systemctl daemon-reload
    act systemctl enable "$1"
    act systemctl restart "$1"
}

usage() {
    cat <<TEXT
Usage: install --superlink HOST:PORT --device NUMBER --ca FILE --key FILE [options]
       install --uninstall [--dry-run]

Makes this machine ($board) a Wildflower node: installs what it needs, puts its key where only the service reads it, and
starts a systemd service that restarts when it ends. Run as root.

  --superlink HOST:PORT  the gate of the deployment
  --device NUMBER        which device this is, from 0; no two may have the same
  --ca FILE              ca.crt of deploy/certs
  --key FILE             the node's private key: nodes/NAME of deploy/certs --add-node NAME; its .pub must be enrolled
  --enrollment HOST:PORT in place of --key: this device makes its key, and enrolls it where deploy/enrollment runs,
                         with --enrollment-token FILE of its kit
  --bandwidth HOST:PORT  the bandwidth service, with --token FILE
  --token FILE           bandwidth.token of deploy/certs
  --trusted FILE         trusted.yaml of deploy/certs: run only apps that app.key has signed (wildflower run --sign)
  --data-dir FOLDER      where the device's data lie
  --memory-max SIZE      the most memory that the service may have, such as 3G or 80% (systemd's MemoryMax)
  --cpu-quota PERCENT    the most CPU that it may have, 100% for each core (systemd's CPUQuota)
  --nice NUMBER          how much it stands back for other programs, 0 to 19 (default: 10)
  --torch-index URL      where pip finds CPU builds of torch
  --image NAME           an image that is here already, in place of one that is built (Jetson)
  --gpu-python FILE      a Python of this board with NVIDIA's PyTorch: train there, on the GPU (Jetson)
  --uninstall            stop and remove the service, the software and the key; the state in $state stays
  --dry-run              only say what would be done
TEXT
}

# The release of systemd, as a number.
systemd_version() { systemctl --version 2>/dev/null | sed -nE '1s/^systemd ([0-9]+).*/\1/p'; }

# What a service may take of the machine, where a unit of systemd holds it: in a container the board's script says it.
limits() {
    echo "Nice=$nice"
    [ -z "$memory_max" ] || echo "MemoryMax=$memory_max"
    [ -z "$cpu_quota" ] || echo "CPUQuota=$cpu_quota"
}

# TLS and the signatures of nodes need the time, which a board without a battery has from the network alone.
synchronize_time() {
    act timedatectl set-ntp true ||
        echo "$board: the clock is set by no service here: install systemd-timesyncd or chrony" >&2
}

# Make the key of this device, and enroll it with the token of its kit. The key gets its place once it is enrolled. A kit
# whose token was used here is left alone, so that this script may run again; a kit with another name brings a new key.
enroll_key() {
    local name
    name=$(cut -d ' ' -f 1 "$2")
    [ -n "$dry_run" ] || [ ! -e "$keys/node.key" ] || [ "$(cat "$keys/node.name" 2>/dev/null)" != "$name" ] || return 0
    act rm -f "$keys/new.key" "$keys/new.key.pub"
    act ssh-keygen -q -t ecdsa -b 384 -N '' -C "$name" -f "$keys/new.key"
    [ -n "$dry_run" ] || cat "$2" "$keys/new.key.pub" >"$keys/enrollment"
    # The curl of JetPack 4 does not know --fail-with-body.
    act curl --silent --show-error --fail --max-time 60 --cacert "$3" --data-binary "@$keys/enrollment" "https://$1/" || {
        act rm -f "$keys/new.key" "$keys/new.key.pub" "$keys/enrollment"
        stop "this device could not enroll its key at $1: see above; 403 says that its token was used or is too old"
    }
    act chown root:wildflower "$keys/new.key"
    act chmod 0640 "$keys/new.key"
    act mv "$keys/new.key" "$keys/node.key"
    echo "$name" | write "$keys/node.name"
    act rm -f "$keys/new.key.pub" "$keys/enrollment"
}

# One value of a node config, quoted for Flower inside the quotes of systemd.
text() { printf '%s=\\"%s\\"' "$1" "$2"; }

main() {
    local superlink='' device='' ca='' key='' bandwidth='' token='' trusted='' data='' enrollment='' enrollment_token='' task=install name
    dry_run='' torch_index='' gpu_python='' prebuilt='' memory_max='' cpu_quota='' nice=10
    while [ $# -gt 0 ]; do
        case $1 in
            --uninstall) task=uninstall; shift; continue ;;
            --dry-run) dry_run=yes; shift; continue ;;
            -h | --help) usage; exit 0 ;;
        esac
        [ $# -ge 2 ] || stop "$1 wants a value, or is unknown; --help lists the arguments"
        case $1 in
            --superlink | --device | --ca | --key | --enrollment | --enrollment-token | --bandwidth | --token | --trusted | \
                --gpu-python | --memory-max | --cpu-quota | --nice)
                name=${1#--}
                printf -v "${name//-/_}" %s "$2" ;;
            --data-dir) data=$2 ;;
            --torch-index) export torch_index=$2 ;;
            --image) prebuilt=$2 ;;
            *) stop "unknown argument: $1" ;;
        esac
        shift 2
    done
    [ -n "$dry_run" ] || [ "$(id -u)" = 0 ] || stop "this must be run as root"
    if [ "$task" = uninstall ]; then
        # Each by itself: what an installation that failed never made must not keep the key on the device.
        act systemctl disable --now wildflower-node.service || true
        act rm -rf "$keys"
        act rm -f "$unit"
        act systemctl daemon-reload || true
        remove_software
        echo "Removed. What the device learned is still in $state."
        return
    fi
    [[ $superlink =~ ^[A-Za-z0-9._-]+:[0-9]+$ ]] || stop "--superlink '$superlink': expected HOST:PORT"
    [[ $device =~ ^(0|[1-9][0-9]*)$ ]] || stop "--device '$device': expected a whole number from 0"
    [ -r "$ca" ] || stop "--ca '$ca': no such file"
    [[ -z $enrollment || $enrollment =~ ^[A-Za-z0-9._-]+:[0-9]+$ ]] || stop "--enrollment '$enrollment': expected HOST:PORT"
    [ -z "$enrollment" ] || [ -r "$enrollment_token" ] || stop "--enrollment needs --enrollment-token FILE"
    [ -n "$enrollment" ] || [ -r "$key" ] || stop "--key '$key': no such file"
    [ -n "$enrollment" ] || grep -q 'PRIVATE KEY' "$key" || stop "--key '$key' is no private key: it is the file without .pub"
    [ -z "$bandwidth$token" ] || [ -r "$token" ] || stop "--bandwidth needs --token FILE"
    [ -z "$token" ] || [[ $bandwidth =~ ^[A-Za-z0-9._-]+:[0-9]+$ ]] || stop "--token needs --bandwidth HOST:PORT"
    [ -z "$trusted" ] || [ -r "$trusted" ] || stop "--trusted '$trusted': no such file"
    [ -z "$data" ] || [[ $data =~ ^/[^[:space:]%\"\\]+$ ]] || stop "--data-dir '$data': expected a whole path"
    [ -z "$data" ] || [ -d "$data" ] || stop "--data-dir '$data': no such folder"
    [[ -z $memory_max || $memory_max =~ ^[1-9][0-9]*[KMG%]$ ]] || stop "--memory-max '$memory_max': expected such as 3G or 80%"
    [[ -z $cpu_quota || $cpu_quota =~ ^[1-9][0-9]*%$ ]] || stop "--cpu-quota '$cpu_quota': expected such as 150%"
    [[ $nice =~ ^1?[0-9]$ ]] || stop "--nice '$nice': expected a whole number from 0 to 19"
    [ -z "$prebuilt" ] || declare -F install_gpu >/dev/null || stop "--image: the node of this board is in no container"
    [ -z "$gpu_python" ] || declare -F install_gpu >/dev/null || stop "--gpu-python: no GPU of this board trains"
    [[ -z $gpu_python || $gpu_python =~ ^/[^[:space:]%]+$ ]] || stop "--gpu-python '$gpu_python': expected a whole path"
    [ -z "$gpu_python" ] || [ -x "$gpu_python" ] || stop "--gpu-python '$gpu_python': no such program"
    check_board

    synchronize_time
    id wildflower >/dev/null 2>&1 ||
        act useradd --system --user-group --uid 10001 --home-dir "$state" --shell /usr/sbin/nologin wildflower
    [ -z "$data" ] || act runuser -u wildflower -- test -r "$data" -a -x "$data" ||
        stop "--data-dir '$data' cannot be read by user wildflower, who the service is"
    act install --directory --owner=wildflower --group=wildflower --mode=0700 "$state" "$state/cache"
    act install --directory --owner=root --group=wildflower --mode=0750 "$keys"
    act install --owner=root --group=wildflower --mode=0640 "$ca" "$keys/ca.crt"
    if [ -z "$enrollment" ]; then
        act install --owner=root --group=wildflower --mode=0640 "$key" "$keys/node.key"
        act rm -f "$keys/node.name"
    else
        enroll_key "$enrollment" "$enrollment_token" "$ca"
    fi
    [ -z "$token" ] || act install --owner=root --group=wildflower --mode=0640 "$token" "$keys/bandwidth.token"
    [ -z "$trusted" ] || act install --owner=root --group=wildflower --mode=0640 "$trusted" "$keys/trusted.yaml"

    local config
    config="partition-id=$device num-partitions=$((device + 1)) $(text state-dir "$state") $(text kind "$(board_kind /proc/device-tree)")"
    [ -z "$gpu_python" ] || config+=" $(gpu_config)"
    [ -z "$data" ] || config+=" $(text data-dir "$data")"
    [ -z "$bandwidth" ] || config+=" $(text bandwidth-address "$bandwidth") $(text bandwidth-ca "$keys/ca.crt")"
    [ -z "$bandwidth" ] || config+=" $(text bandwidth-token-file "$keys/bandwidth.token")"

    install_software
    # Before a service is made of it: old Docker engines let no thread start in newer images, and PyTorch has had builds
    # that older ARM processors end with an illegal instruction.
    act "${python[@]}" -c 'import threading; threading.Thread(target=int).start()' || stop "$no_threads"
    act "${python[@]}" -c 'import torch; print("torch", torch.__version__)' ||
        stop "PyTorch does not work on this board: see above, and --torch-index for other builds"
    if [ -n "$gpu_python" ]; then
        install_gpu
    elif declare -F remove_gpu >/dev/null && [ -z "$dry_run" ]; then
        remove_gpu
    fi
    local version watched=''
    version=$(systemd_version)
    # When memory runs out the kernel kills the work, not the node: that is no reason to stop the node.
    [ "${version:-0}" -lt 243 ] || watched='OOMPolicy=continue'
    write "$unit" <<TEXT
[Unit]
Description=Wildflower node
Wants=network-online.target time-sync.target
After=network-online.target time-sync.target $(after)
StartLimitIntervalSec=0

[Service]
$(node_command "$superlink" "$config" "$data")
Restart=always
RestartSec=15
# The server refuses the node's key: it was revoked, or never enrolled. Starting again does not help.
RestartPreventExitStatus=77
LogRateLimitIntervalSec=60
LogRateLimitBurst=600
$watched

[Install]
WantedBy=multi-user.target
TEXT
    start wildflower-node.service
    echo "Installed. What it says: journalctl --unit wildflower-node --follow"
}

# The board with a device tree in this folder, as `wildflower.devices.probe.board_kind` names it: a container does not see it.
board_kind() {
    local tree=$1 model='' chip
    [ ! -r "$tree/model" ] || model=$(tr -d '\0' <"$tree/model")
    if [[ $model =~ ^(Raspberry Pi|NVIDIA Jetson) ]]; then
        sed -E 's/[[:space:]]+(Rev|Model|Developer Kit|Engineering).*//; s/^NVIDIA //' <<<"$model" |
            tr '[:upper:]' '[:lower:]' | sed -E 's/[^a-z0-9]+/-/g; s/^-|-$//g'
        return
    fi
    if [ -r "$tree/compatible" ]; then
        while read -r chip; do
            case $chip in
                nvidia,tegra210) echo jetson-nano; return ;;
                nvidia,tegra186) echo jetson-tx2; return ;;
                nvidia,tegra194) echo jetson-xavier; return ;;
                nvidia,tegra234) echo jetson-orin; return ;;
            esac
        done < <(tr '\0' '\n' <"$tree/compatible")
    fi
    uname -m | tr 'A-Z_' 'a-z-'
}
