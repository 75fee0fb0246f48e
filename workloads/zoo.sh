#!/usr/bin/env bash
# Measures unmodified programs, one after the other, with `elfen lab bench batch`. Columns of the
# table:
#
# - overlap in %, for busy times of 200 us, 1 ms and 10 ms, by the scheduler's trace;
# - the overlap with only a guard;
# - reaction in us, for the shortest busy times;
# - the time of a run on an idle lane, compared with a run that has only a guard;
# - whether the output is the output of a run alone.
#
# ! marks a figure above its limit. Then two tables sum up the programs in native code, and those
# with a JIT: for each busy time the guard's median, and the best, the median and the worst program
# with live checks.
#
# usage: zoo.sh [--lanes R:B] [--turns 200us,1ms,10ms] [-d 5s] [--runs N] [NAME...]
#
# Needs root, cargo build --release, python3, and the programs to be measured.
# Takes about two minutes for each program with 10 rounds.
set -euo pipefail

lanes=0:1 turns=200us,1ms,10ms duration=5s runs=10 names=()
usage() {
	sed -n '/^# usage/s/^# //p' "$0" >&2
	exit 2
}
while (($#)); do
	case $1 in
	--lanes | --turns | --duration | --runs)
		(($# > 1)) || usage
		declare "${1#--}=$2"
		shift
		;;
	-d)
		(($# > 1)) || usage
		duration=$2
		shift
		;;
	-*) usage ;;
	*) names+=("$1") ;;
	esac
	shift
done
root=$(cd "$(dirname "$0")/.." && pwd)
lab=${CARGO_TARGET_DIR:-$root/target}/release/elfen-lab
[ -x "$lab" ] || { echo "$0: no $lab: cargo build --release" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$root"/elfen/tests/zoo/* "$folder"
cd "$folder"

# Makes a text of 8 MB, which is equal on all machines, files from it, and programs that must be
# compiled. A run alone should take some seconds. A shorter run mostly learns loops, and a longer
# run wastes time.
python3 - <<'PYTHON'
seed, words = 1, []
for _ in range(4_000_000):
    seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
    words.append("word%d" % ((seed >> 33) % 5000))
open("text", "w").write(" ".join(words[:900_000]))
open("lines", "w").write("\n".join(words * 4) + "\n")
of = "int f%d(int a, int b) { for (int i = 0; i < b; i++) a = a * %d + i %% 7; return a ^ %d; }\n"
open("big.c", "w").write("".join(of % (n, n, n) for n in range(1500)))
open("big.sql", "w").write(open("work.sql").read().replace("150000", "3000000"))
PYTHON
for _ in $(seq 110); do cat text; done >long
if command -v go >/dev/null; then GOCACHE=$PWD/cache GO111MODULE=off go build -o go-work work.go; fi
if command -v javac >/dev/null; then javac Work.java; fi

clip='-f lavfi -i testsrc=duration=300:size=320x240'
# Name, class (`reads`: the kernel does a part of the work; `jit`), and command.
zoo="\
xz|native|xz -6 -T1 -c text
zstd|native|zstd -q -T2 -15 -c text
gzip|native|gzip -9 -c text
python3|reads|python3 work.py 40
perl|native|perl work.pl 60
lua|native|lua5.4 work.lua 40
sqlite3|native|sqlite3 :memory: '.read big.sql'
gcc|native|gcc -O2 -S -o - big.c
sort|native|env LC_ALL=C sort --parallel=2 lines
openssl|native|openssl enc -aes-256-cbc -K 00 -iv 00 -in long
sha256sum|reads|sha256sum long
ffmpeg|native|ffmpeg -v error -threads 2 $clip -c:v mpeg4 -bitexact -f avi -
go|native|./go-work 60
busybox|native|busybox sh work.sh 12
rust|reads|$lab simulate --rps 100 --policy borrow-idle --requests 30000000 --json
java|jit|java -cp . Work 60
node|jit|node work.js 30"

printf '%-10s %-24s %-21s %-15s %-9s %s\n' \
	program 'overlap %' "guard's" 'us p50/p90/p99' slowdown output
while IFS='|' read -r name class program; do
	if ((${#names[@]})) && [[ " ${names[*]} " != *" $name "* ]]; then continue; fi
	command -v "${program%% *}" >/dev/null || { echo "$name: not installed"; continue; }
	eval "words=($program)"
	"$lab" bench batch --lanes "$lanes" --checks live --turns "$turns" --duration "$duration" \
		--runs "$runs" --json -- "${words[@]}" </dev/null >report.json 2>errors ||
		[ -s report.json ] || { echo "$name: $(tail -n 1 errors)"; continue; }
	python3 - "$name" "$class" <<'PYTHON'
import json, sys
name, kind = sys.argv[1:]
report = json.load(open("report.json"))
bars = {"native": (6, 2, 0.4), "reads": (10, 4, 1)}.get(kind)
bar_of = dict(zip((200_000, 1_000_000, 10_000_000), bars)) if bars else {}
rows = {how: [row for row in report["rows"] if (row["checks"] == "guard") == (how == "guard")]
        for how in ("guard", "live")}
guards = {row["turn_ns"]: row["percent"] for row in rows["guard"]}
def mark(value, bar, form):
    return form % value + ("!" if bar is not None and value > bar else "")
def percent(row):
    if row["percent"] is None:
        return "-"
    return mark(row["percent"], bar_of.get(row["turn_ns"], guards.get(row["turn_ns"])), "%.2f")
stop = rows["live"][0]["reaction_ns"] or {}
stop = "/".join("%.0f" % (stop[key] / 1000) for key in ("median", "p90", "p99")) if stop else "-"
slow = report["whole"][1]["slowdown"] if "whole" in report else None
slow = mark(slow["median"], 1.05, "%.3f") if slow else "-"
compared = report["compared"]
if not compared:
    output = "not compared"
else:
    runs, wrong = (sum(one[key] for one in compared) for key in ("runs", "different"))
    output = f"as alone, {runs} runs" if not wrong else f"DIFFERENT in {wrong} of {runs} runs"
lives, alone = (", ".join(texts) for texts in (
    [percent(row) for row in rows["live"]],
    ["-" if row["percent"] is None else "%.1f" % row["percent"] for row in rows["guard"]]))
print(f"{name:10} {lives:24} {alone:21} {stop:15} {slow:9} {output}", flush=True)
sums = {"name": name, "kind": "jit" if kind == "jit" else "native"}
for how in ("guard", "live"):
    sums[how] = {row["turn_ns"]: row["percent"] for row in rows[how] if row["percent"] is not None}
sums["slowdown"] = report["whole"][1]["slowdown"]["median"] if slow != "-" else None
with open("sums", "a") as file:
    print(json.dumps(sums), file=file)
PYTHON
done <<<"$zoo"

[ -s sums ] || exit 0
python3 - <<'PYTHON'
import json
from statistics import median
every = [json.loads(line) for line in open("sums")]
for kind in ("native", "jit"):
    programs = [sums for sums in every if sums["kind"] == kind]
    if not programs:
        continue
    names = " ".join(sums["name"] for sums in programs)
    print(f"\n{kind}, {len(programs)} programs ({names}), overlap in %:")
    form = "%-8s %-18s %-26s %-18s %s"
    print(form % ("busy", "guard, median", "live checks, best", "median", "worst"))
    for turn in sorted({turn for sums in programs for turn in sums["live"]}, key=int):
        guards = [sums["guard"][turn] for sums in programs if turn in sums["guard"]]
        lives = [(sums["live"][turn], sums["name"]) for sums in programs if turn in sums["live"]]
        lives.sort()
        (best, first), (worst, last) = lives[0], lives[-1]
        middle = median(percent for percent, _ in lives)
        guard = "%.1f" % median(guards) if guards else "-"
        print(form % (f"{int(turn) // 1000} us", guard, f"{best:.2f} ({first})",
                      f"{middle:.2f}", f"{worst:.2f} ({last})"))
    slow = [sums["slowdown"] for sums in programs if sums["slowdown"] is not None]
    if slow:
        print(f"slowdown: median {median(slow):.3f}, worst {max(slow):.3f}")
PYTHON
