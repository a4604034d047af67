#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs a build folder into a temporary prefix and uses it as a stranger would: by pkg-config
# and by find_package, shared and static, and the command with its manual page.
#   check_install.sh SOURCE BUILD
set -eu
source=$1
build=$2
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --install "$build" --prefix "$prefix/usr" >"$prefix/log" || { cat "$prefix/log"; exit 1; }

PKG_CONFIG_PATH=$(dirname "$(find "$prefix/usr" -name pkv.pc)")
LD_LIBRARY_PATH=$(dirname "$PKG_CONFIG_PATH")
export PKG_CONFIG_PATH LD_LIBRARY_PATH
for package in pkv pkv_engine; do
  define=-DCONSUMER_$(echo "${package#pkv_}" | tr '[:lower:]' '[:upper:]')
  # shellcheck disable=SC2046 # several words are meant
  cc -std=c11 -Wall -Werror "$define" "$source/tests/install/consumer.c" \
    -o "$prefix/shared" $(pkg-config --cflags --libs "$package")
  # shellcheck disable=SC2046
  cc -std=c11 -Wall -Werror "$define" "$source/tests/install/consumer.c" -o "$prefix/static" \
    -Wl,-Bstatic $(pkg-config --cflags --static --libs-only-L "$package") -l"$package" -lpkv \
    -Wl,-Bdynamic $(pkg-config --static --libs "$package" | sed 's/-lpkv[a-z_]*//g')
  echo "pkg-config $package: $("$prefix/shared"), static $("$prefix/static")"
  readelf -d "$prefix/static" | grep -q 'NEEDED.*libpkv' && { echo "static is not"; exit 1; }
done

cmake -G Ninja -S "$source/tests/install" -B "$prefix/consumer" \
  -DCMAKE_PREFIX_PATH="$prefix/usr" >"$prefix/log" || { cat "$prefix/log"; exit 1; }
cmake --build "$prefix/consumer" >"$prefix/log" || { cat "$prefix/log"; exit 1; }
for name in pkv pkv_static pkv_engine pkv_engine_static; do
  echo "find_package $name: $("$prefix/consumer/use_$name")"
done

if [ -x "$build/pkv" ]; then
  "$prefix/usr/bin/pkv" --version
  grep -q '^\.TH' "$prefix/usr/share/man/man1/pkv.1"
fi

# The unit: what systemd itself says of it, with the command where the unit expects it.
unit=$prefix/usr/lib/systemd/system/pkv-serve.service
if [ -x "$build/pkv" ] && command -v systemd-analyze >/dev/null; then
  sed "s|^ExecStart=[^ ]*|ExecStart=$prefix/usr/bin/pkv|" "$unit" >"$prefix/pkv-serve.service"
  systemd-analyze verify --man=no "$prefix/pkv-serve.service" 2>"$prefix/log" || cat "$prefix/log"
  ! grep 'pkv-serve' "$prefix/log"
  exposure=$(systemd-analyze security --offline=true --no-pager "$prefix/pkv-serve.service" |
    sed -n 's/.*Overall exposure level[^:]*: \([0-9.]*\).*/\1/p')
  echo "pkv-serve.service: exposure $exposure of 10"
  [ "${exposure%%.*}" -lt 3 ]
fi
