#!/usr/bin/env bash
# Measures unmodified Redis and nginx on the request lane, with a batch program next to them.
#
# elfen-load loads each service in three ways. The ways alternate, once in each round:
#
# - alone;
# - with an unrestrained batch, which may run on both lanes;
# - with this batch under `elfen run --policy borrow-idle`. Only the task map shows when the request
#   lane idles.
#
# usage: real-services.sh [--lanes R:B] [--rps N] [--seconds N] [--rounds N] [redis|nginx...]
#
# Needs root for the task map, cargo build --release, and redis-server and nginx of Debian.
# The generator runs on CPUs outside the pair. Without such CPUs it runs on the batch lane, and the
# unrestrained batch disturbs it as well. A column shows how late it sent.
set -euo pipefail

lanes=0:1 rps=2000 seconds=10 rounds=3 services=()
usage() {
	sed -n '/^# usage/s/^# //p' "$0" >&2
	exit 2
}
while (($#)); do
	case $1 in
	redis | nginx) services+=("$1") ;;
	--lanes | --rps | --seconds | --rounds)
		(($# > 1)) || usage
		declare "${1#--}=$2"
		shift
		;;
	*) usage ;;
	esac
	shift
done
((${#services[@]})) || services=(redis nginx)
request=${lanes%%:*} batch=${lanes#*:}
here=$(dirname "$0")
PATH=${ELFEN_BIN:-$here/../target/release}:$PATH:/usr/sbin

fail() { # <status> <why>
	echo "real-services: $2" >&2
	exit "$1"
}
declare -A program=([redis]=redis-server [nginx]=nginx)
for tool in elfen elfen-load elfen-batch taskset "${services[@]}"; do
	tool=${program[$tool]:-$tool}
	command -v "$tool" >/dev/null || fail 3 "$tool is missing: install it, or build it"
done
elfen run --lanes "$lanes" --source tasks --dry-run -- elfen-batch spin >/dev/null ||
	fail 3 "the task map is not available: run this as root"

scratch=$(mktemp -d)
service_pid= batch_pid=
clean_up() {
	for pid in $batch_pid $service_pid; do
		kill "$pid" && wait "$pid" || true
	done
	rm -r "$scratch"
}
trap clean_up EXIT
# nginx's workers drop root, and create temporary files in this folder.
chmod 755 "$scratch"

expand() { # <CPU list> -> a CPU a line
	tr , '\n' <<<"$1" |
		awk -F- '{ for (cpu = $1; cpu <= ($2 == "" ? $1 : $2); cpu++) print cpu }' | sort
}
all=$(taskset -cp $$ | sed 's/.*: //')
generator=$(comm -23 <(expand "$all") <(expand "$request,$batch") | paste -sd,)
where="CPUs $generator"
[ -n "$generator" ] || generator=$batch where="the batch lane, as there is no other CPU"
echo "pair $lanes, $rps requests/s, $rounds rounds of $seconds s; elfen-load on $where"

load() { # <file for the JSON> <elfen-load's arguments>...
	local json=$1
	shift
	taskset -c "$generator" elfen-load --json --allow-late "$@" >"$json" 2>>"$scratch/log" ||
		fail 1 "elfen-load failed: $(tail -1 "$scratch/log")"
}

# Prints the first number with this name after the start of this object.
figure() { # <file> <object, or empty> <key>
	tr ',{' '\n\n' <"$1" | awk -F: -v object="\"$2\"" -v key="\"$3\"" '
		index($0, object) || object == "\"\"" { inside = 1 }
		inside && index($0, key) && $2 + 0 == $2 + 0 && $2 ~ /[0-9]/ {
			gsub(/[ }\]]/, "", $2); print $2; exit
		}'
}

port=$((20000 + $$ % 20000))
value=$(printf '%01024d' 0)
start() { # <service>: sets service_pid, url and requests
	local command
	requests=$scratch/requests
	url=$1://127.0.0.1:$port
	case $1 in
	redis)
		command=(redis-server --port $port --bind 127.0.0.1 --save '' --loglevel warning)
		echo "SET elfen $value" >"$scratch/first"
		echo "GET elfen" >"$requests"
		;;
	nginx)
		url=http://127.0.0.1:$port
		cat >"$scratch/nginx.conf" <<-END
			daemon off; worker_processes 1; pid $scratch/nginx.pid;
			error_log stderr crit;
			events { }
			http {
				access_log off; keepalive_requests 100000000;
				client_body_temp_path $scratch/body; proxy_temp_path $scratch/proxy;
				fastcgi_temp_path $scratch/fastcgi; uwsgi_temp_path $scratch/uwsgi;
				scgi_temp_path $scratch/scgi;
				server {
					listen 127.0.0.1:$port;
					location / { return 200 "$value"; }
				}
			}
		END
		command=(nginx -c "$scratch/nginx.conf")
		echo "/elfen" >"$scratch/first"
		echo "/elfen" >"$requests"
		;;
	esac
	taskset -c "$request" "${command[@]}" >>"$scratch/log" 2>&1 &
	service_pid=$!
	until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
		kill -0 "$service_pid" 2>/dev/null || fail 1 "$1 ended: $(tail -3 "$scratch/log")"
		sleep 0.1
	done
	load "$scratch/ignored" --requests 1 --connections 1 --queries "$scratch/first" "$url"
}

stop() {
	kill "$service_pid"
	wait "$service_pid" || true
	service_pid=
	port=$((port + 1))
}

measure() { # <service> <mode> <round>
	local work=- overlap=-
	local batch_program=(elfen-batch compress --duration 3600s --json)
	case $2 in
	alone) ;;
	unrestrained) taskset -c "$request,$batch" "${batch_program[@]}" >"$scratch/batch" & ;;
	elfen)
		elfen run --lanes "$lanes" --source tasks --policy borrow-idle \
			--json-out "$scratch/run" -- "${batch_program[@]}" \
			>"$scratch/batch" 2>>"$scratch/log" &
		;;
	esac
	[ "$2" = alone ] || batch_pid=$!
	echo "$1, $2, round $3" >&2
	load "$scratch/load" --rps "$rps" --warmup 1s --duration "${seconds}s" --seed "$3" \
		--connections 16 --queries "$scratch/requests" "$url"
	if [ -n "$batch_pid" ]; then
		kill -TERM "$batch_pid"
		wait "$batch_pid" || fail 1 "the batch failed: $(tail -1 "$scratch/log")"
		batch_pid=
		work=$(figure "$scratch/batch" '' per_second)
	fi
	if [ "$2" = elfen ]; then
		overlap=$(echo "$(figure "$scratch/run" '' overlapped_ns)" \
			"$(figure "$scratch/run" '' request_busy_ns)" |
			awk '{ printf "%.2f", $2 ? 100 * $1 / $2 : 0 }')
	fi
	echo "$1 $2" "$(figure "$scratch/load" latency_us p50)" \
		"$(figure "$scratch/load" latency_us p99)" \
		"$(figure "$scratch/load" late_us p99)" "$(figure "$scratch/load" '' errors)" \
		"$work" "$overlap" >>"$scratch/figures"
}

for service in "${services[@]}"; do
	start "$service"
	for ((round = 1; round <= rounds; round++)); do
		for mode in alone unrestrained elfen; do
			measure "$service" $mode $round
		done
	done
	stop
done

awk '
	function median(list,    values, n, i, j, swap) {
		n = split(list, values, " ")
		if (values[1] == "-") return "-"
		for (i = 2; i <= n; i++)
			for (j = i; j > 1 && values[j - 1] + 0 > values[j] + 0; j--) {
				swap = values[j]; values[j] = values[j - 1]; values[j - 1] = swap
			}
		return (values[int((n + 1) / 2)] + values[int(n / 2) + 1]) / 2
	}
	!(($1, $2) in seen) { seen[$1, $2] = 1; order[++rows] = $1 SUBSEP $2 }
	{ for (field = 3; field <= 8; field++) all[$1, $2, field] = all[$1, $2, field] " " $field }
	END {
		print "| service | batch | p50 us | p99 us | sent late, p99 us | errors " \
			"| batch work/s | overlap, % |"
		print "| --- | --- | --- | --- | --- | --- | --- | --- |"
		for (row = 1; row <= rows; row++) {
			split(order[row], name, SUBSEP)
			line = "| " name[1] " | " name[2]
			for (field = 3; field <= 8; field++)
				line = line " | " median(all[name[1], name[2], field])
			print line " |"
		}
	}' "$scratch/figures"
