#!/bin/sh
# Builds two Luas whose functions report that they run, for `elfen lab bench shim --lua`:
# lua-entries reports only entries, lua-returns reports entries and returns.
#
# usage: lua.sh FOLDER [SOURCE]
#
# SOURCE is the folder of Lua 5.4's lapi.c. Without SOURCE, cargo fetches the crate lua-src, which
# contains it. Needs gcc, and libelfen_return.a in target/release. The Luas only run a Lua file and
# pass its arguments, because the crate has no lua.c.
set -eu

folder=${1:?name a folder for the Luas}
here=$(dirname "$0")
returns=${ELFEN_BIN:-$here/../target/release}/libelfen_return.a
for tool in gcc "$returns"; do
	command -v "$tool" >/dev/null || [ -e "$tool" ] || {
		echo "lua.sh: no $tool: install it, or cargo build --release" >&2
		exit 3
	}
done

scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

source=${2:-}
if [ -z "$source" ]; then
	cat >"$scratch/Cargo.toml" <<-END
		[package]
		name = "carries"
		version = "0.0.0"
		edition = "2021"
		[lib]
		path = "lib.rs"
		[dependencies]
		lua-src = "=547.1.0"
	END
	: >"$scratch/lib.rs"
	at=$(cargo metadata --format-version 1 --manifest-path "$scratch/Cargo.toml" |
		sed -n 's|.*"manifest_path":"\([^"]*/lua-src-[^"]*\)/Cargo.toml".*|\1|p')
	source=$at/lua-5.4.7
fi

mkdir -p "$folder"
cat >"$scratch/main.c" <<'END'
#include <stdio.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
int main(int words, char **word)
{
	lua_State *lua = luaL_newstate();
	if (lua == NULL || words < 2)
		return 2;
	luaL_openlibs(lua);
	lua_newtable(lua);
	for (int at = 1; at < words; at++) {
		lua_pushstring(lua, word[at]);
		lua_rawseti(lua, -2, at - 1);
	}
	lua_setglobal(lua, "arg");
	if (luaL_dofile(lua, word[1]) != LUA_OK) {
		fprintf(stderr, "%s\n", lua_tostring(lua, -1));
		return 1;
	}
	lua_close(lua);
	return 0;
}
END
build() { # <name> <options of both compiler and linker>
	name=$1
	shift
	objects=
	for file in "$scratch/main.c" "$source"/*.c; do
		case ${file##*/} in lua.c | luac.c) continue ;; esac
		object=$scratch/$(basename "$file" .c).o
		gcc -O2 -DLUA_USE_POSIX -I"$source" -fpatchable-function-entry=43 "$@" \
			-c -o "$object" "$file"
		objects="$objects $object"
	done
	# shellcheck disable=SC2086
	gcc -o "$folder/$name" $objects ${libraries:-} -lm
	echo "$folder/$name"
}
build lua-entries
libraries=$returns build lua-returns -mfunction-return=thunk-extern
