# SPDX-License-Identifier: Apache-2.0
"""The checkers can fail: each rule is shown a bad example, and a near miss that must pass."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TOOLS = os.path.join(ROOT, "tools")
SPDX = "/* SPDX-License-Identifier: Apache-2.0 */\n"
LAYERS = """base src/base -
kv src/kv base
sched src/sched base
backend src/backend base
cpu src/backend/cpu base backend
cli src/cli base
foreign xxhash.h base
"""


class Tree(unittest.TestCase):
    """A small source tree in a temporary folder."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = holder.name
        self.write("LAYERS", LAYERS)

    def write(self, path, text):
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as f:
            f.write(text)

    def run_tool(self, name, *args):
        command = [sys.executable, os.path.join(TOOLS, name), "--root", self.root, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def assert_refused(self, tool, *words):
        code, out = self.run_tool(tool)
        self.assertEqual(code, 1, out)
        for word in words:
            self.assertIn(word, out)

    def assert_passes(self, tool, *args):
        code, out = self.run_tool(tool, *args)
        self.assertEqual(code, 0, out)
        return out


class CheckHardening(unittest.TestCase):
    """Programs built without one of the guards are told apart from one that has all."""

    GUARDS = ("-fPIE -pie -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack -fstack-protector-strong "
              "-O2 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2").split()
    CODE = """#include <stdio.h>
    #include <string.h>
    int main(int n, char **v) { char b[64]; strcpy(b, v[n - 1]); return puts(b); }"""

    def faults(self, *more):
        with tempfile.TemporaryDirectory() as folder:
            source, program = os.path.join(folder, "a.c"), os.path.join(folder, "a")
            with open(source, "w", encoding="ascii") as file:
                file.write(self.CODE)
            subprocess.run(["cc", *self.GUARDS, *more, source, "-o", program], check=True)
            done = subprocess.run(
                [sys.executable, os.path.join(ROOT, "tests", "tools", "check_hardening.py"),
                 "--optimised", program], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0 if " 0 faults" in done.stdout else 1)
        return done.stdout

    def test_guards(self):
        self.assertIn(" 0 faults", self.faults())
        for flag, words in (("-fno-stack-protector", "does not guard its stack"),
                            ("-U_FORTIFY_SOURCE", "does not check its copies"),
                            ("-Wl,-z,lazy", "binds late"), ("-Wl,-z,norelro", "has no RELRO"),
                            ("-Wl,-z,execstack", "executable stack"),
                            ("-no-pie", "not position-independent")):
            self.assertIn(words, self.faults(flag), flag)


class CheckLayers(Tree):
    def setUp(self):
        super().setUp()
        self.write("include/pkv/pkv.h", "#include <stdint.h>\n")
        for room in ("base", "kv", "sched", "backend", "backend/cpu", "cli"):
            self.write(f"src/{room}/{os.path.basename(room)}_x.h", "")

    def includes(self, path, *names):
        self.write(path, "".join(f"#include {n}\n" for n in names))

    def test_allowed(self):
        self.includes("src/kv/kv_x.c", '"kv/kv_x.h"', "<stdio.h>", '"base/base_x.h"', '"pkv/pkv.h"')
        self.includes("src/backend/cpu/a.c", '"backend/backend_x.h"', '"backend/cpu/cpu_x.h"')
        self.includes("src/base/hash.c", "<xxhash.h>")
        self.write("src/kv/b.c", '/* #include "sched/sched_x.h" */\n// #include "../x.h"\n')
        self.assert_passes("check_layers")

    def test_upward(self):
        self.includes("src/base/a.c", '"kv/kv_x.h"')
        self.assert_refused("check_layers", "src/base/a.c:1", "may not include room kv")

    def test_sideways(self):
        self.includes("src/kv/a.c", "<stdio.h>", '"sched/sched_x.h"')
        self.assert_refused("check_layers", "src/kv/a.c:2", "may not include room sched")

    def test_nested_room_is_a_room_of_its_own(self):
        self.includes("src/backend/a.c", '"backend/cpu/cpu_x.h"')
        self.assert_refused("check_layers", "may not include room cpu")

    def test_command_line_sees_base_and_public_headers_only(self):
        self.includes("src/cli/a.c", '"kv/kv_x.h"')
        self.assert_refused("check_layers", "room cli may not include room kv")

    def test_parent_folder(self):
        self.includes("src/kv/a.c", '"../base/base_x.h"')
        self.assert_refused("check_layers", '"../" in an include')

    def test_not_written_from_src(self):
        self.includes("src/kv/a.c", '"kv_x.h"')
        self.assert_refused("check_layers", "no header of ours")

    def test_missing_header(self):
        self.includes("src/kv/a.c", '"base/nowhere.h"', '"pkv/nowhere.h"')
        self.assert_refused("check_layers", "base/nowhere.h", "pkv/nowhere.h")

    def test_foreign_header_in_the_wrong_room(self):
        self.includes("src/kv/a.c", "<xxhash.h>")
        self.assert_refused("check_layers", "<xxhash.h> is not known for room kv")

    def test_computed(self):
        self.write("src/kv/a.c", "#include HEADER\n")
        self.assert_refused("check_layers", "computed include")

    def test_own_header_first(self):
        self.includes("src/kv/kv_x.c", "<stdio.h>", '"kv/kv_x.h"')
        self.assert_refused("check_layers", "its own header, must come first")

    def test_unknown_room(self):
        self.includes("src/news/a.c", "<stdio.h>")
        self.assert_refused("check_layers", "no room of LAYERS")

    def test_public_header_and_examples_see_no_room(self):
        self.includes("include/pkv/bad.h", "<cuda_runtime.h>")
        self.includes("examples/a.c", '"base/base_x.h"')
        self.assert_refused("check_layers", "cuda_runtime.h: only", "base/base_x.h: only")

    def test_layers_names_only_lower_rooms(self):
        self.write("LAYERS", "base src/base kv\nkv src/kv -\n")
        self.assert_refused("check_layers", "stands no lower")


class CheckSource(Tree):
    def code(self, text, path="src/kv/a.c"):
        self.write(path, SPDX + text)

    def test_clean(self):
        self.code(
            "/* strcpy(a, b), malloc(3), printf: only named */\n"
            'static const char *s = "malloc(1); printf(\\"x\\") // TODO";\n'
            "int f(struct a *a) {\n  a->free(a, 0);\n  a->x.malloc(3);\n  my_free(s);\n"
            "  // exit(1)\n  return snprintf(a, 1, s);\n}\n"
        )
        self.assert_passes("check_source")

    def test_unsafe_calls_everywhere(self):
        for call in ("strcpy(a, b)", "sprintf (a, b)", "atoi(a)", "strtok(a, b)", "alloca(3)"):
            for path in ("src/kv/a.c", "tests/unit/a.c", "src/cli/a.c"):
                with self.subTest(call=call, path=path):
                    self.setUp()
                    self.code(f"void f(void) {{\n  {call};\n}}\n", path)
                    self.assert_refused("check_source", f"{path}:3", "has no bound or no error")

    def test_memory_outside_its_file(self):
        self.code("void f(void) {\n  free(malloc(3));\n}\n", "src/base/alloc.c")
        self.code("void f(void) {\n  free(malloc(3));\n}\n", "tests/unit/test_a.c")
        self.assert_passes("check_source")
        self.code("void f(void) {\n  free(p);\n}\n")
        self.assert_refused("check_source", "free() belongs to src/base/alloc.c")
        self.code("void f(void) {\n  g(strdup(p));\n}\n", "src/cli/b.c")
        self.assert_refused("check_source", "strdup() belongs")

    def test_environment_outside_its_file(self):
        self.code("int f(void) {\n  return getenv(n) != 0;\n}\n", "src/base/env.c")
        self.assert_passes("check_source")
        self.code("int f(void) {\n  return getenv(n) != 0;\n}\n")
        self.assert_refused("check_source", "getenv() belongs to src/base/env.c")

    def test_a_library_does_not_talk(self):
        self.code("void f(void) {\n  printf(x);\n}\n", "src/cli/a.c")
        self.assert_passes("check_source")
        for call in ("printf(x)", "fputs(x, stderr)", "exit(1)", "abort()", "assert(x)"):
            with self.subTest(call=call):
                self.code(f"void f(void) {{\n  {call};\n}}\n", "src/engine/b.c")
                self.assert_refused("check_source", "never prints, exits or aborts")
        self.code("_Static_assert(1, x);\n", "src/engine/b.c")
        self.assert_passes("check_source")

    def test_double_underscore(self):
        self.code("int pkv_a_b;\nint pkv__c;\n")
        self.assert_refused("check_source", "src/kv/a.c:3", "pkv__c")

    def test_todo_needs_an_issue(self):
        self.code("/* TODO(#12): later */\n")
        self.assert_passes("check_source")
        self.code("/* TODO: later */\n")
        self.assert_refused("check_source", "TODO without an issue")

    def test_width_blanks_and_licence(self):
        self.code("/* " + "x" * 94 + " */\n")
        self.assert_passes("check_source")
        self.code("/* " + "x" * 95 + " */\nint a; \n")
        self.assert_refused("check_source", "101 columns", "src/kv/a.c:3: blanks")
        self.write("src/kv/a.c", "int a;\n")
        self.assert_refused("check_source", "no SPDX")

    def test_long_files(self):
        self.code("int a;\n" * 900)
        self.assertIn("1 warnings", self.assert_passes("check_source"))
        self.code("int a;\n" * 1200)
        self.assert_refused("check_source", "1201 lines")

    def body(self, lines, head="int f(int a)"):
        return head + " {\n" + "  a++;\n" * (lines - 2) + "}\n"

    def test_long_functions(self):
        self.code(self.body(60))
        self.assertIn(" 0 warnings", self.assert_passes("check_source"))
        self.code(self.body(61))
        self.assertIn("function f has 61 lines", self.assert_passes("check_source", "--warnings"))
        self.code(self.body(121))
        self.assert_refused("check_source", "function f has 121 lines (at most 120)")

    def test_kernels_may_be_longer(self):
        self.code(self.body(200), "src/backend/cpu/a.c")
        self.assert_passes("check_source")
        self.code(self.body(201), "src/backend/cpu/a.c")
        self.assert_refused("check_source", "at most 200")

    def test_function_after_branches_structs_and_extern_c(self):
        self.code(
            '#ifdef __cplusplus\nextern "C" {\n#endif\n'
            "struct s {\n" + "  int a;\n" * 130 + "};\nstatic const int t[] = {\n"
            + "  1,\n" * 130 + "};\n"
            "#if A\nint g(int a) {\n#else\nint g(long a) {\n#endif\n  return 1;\n}\n"
            + self.body(121, "__attribute__((noinline)) int h(int a)")
        )  # fmt: skip
        code, out = self.run_tool("check_source")
        self.assertEqual((code, out.count("function")), (1, 1), out)
        self.assertIn("function h has 121", out)

    def test_file_names_are_unique(self):
        self.code("int a;\n", "src/kv/same.c")
        self.code("int b;\n", "src/base/same.c")
        self.assert_refused("check_source", "the name is taken")


class CheckAbi(Tree):
    HEADER = "#define PKV_API\nPKV_API int pkv_a(void);\nPKV_API const char *pkv_b(int);\n"

    def setUp(self):
        super().setUp()
        self.write("include/pkv/pkv.h", self.HEADER)
        self.write("tools/abi.txt", "# list\npkv pkv_a\npkv pkv_b\n")
        self.build("pkv", "pkv_a", "pkv_b")
        self.build("pkv_engine", "pkv_a", "pkv_b")

    def build(self, library, *functions):
        source = os.path.join(self.root, "x.c")
        with open(source, "w", encoding="utf-8") as f:
            f.write("".join(f"int {name}(void) {{ return 0; }}\n" for name in functions))
        target = os.path.join(self.root, f"lib{library}.so")
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", target], check=True)

    def check(self):
        return self.run_tool("check_abi", self.root)

    def test_equal(self):
        code, out = self.check()
        self.assertEqual(code, 0, out)

    def test_one_export_too_many(self):
        self.build("pkv", "pkv_a", "pkv_b", "leaked")
        code, out = self.check()
        self.assertEqual(code, 1)
        self.assertIn("libpkv.so exports leaked", out)

    def test_one_export_missing(self):
        self.build("pkv_engine", "pkv_a")
        code, out = self.check()
        self.assertEqual(code, 1)
        self.assertIn("libpkv_engine.so does not export it", out)

    def test_not_listed_and_not_declared(self):
        self.write("include/pkv/pkv.h", self.HEADER + "PKV_API void pkv_new(void);\n")
        self.write("tools/abi.txt", "pkv pkv_a\npkv pkv_b\npkv pkv_gone\n")
        code, out = self.check()
        self.assertEqual(code, 1)
        self.assertIn("pkv_new is declared in include/pkv but not listed", out)
        self.assertIn("pkv_gone is listed in tools/abi.txt but not declared", out)


@unittest.skipUnless(shutil.which("clang"), "there is no clang")
class CheckClang(Tree):
    """What the compiler of the build folder says is heard; nothing to read is no success."""

    def read(self, *texts):
        entries = []
        for i, text in enumerate(texts):
            self.write(f"x{i}.c", text)
            command = f"/usr/bin/ccache clang -Wall -Werror -o x.o -c {self.root}/x{i}.c"
            entries.append({"directory": self.root, "file": f"x{i}.c", "command": command})
        self.write("compile_commands.json", json.dumps(entries))
        command = [sys.executable, os.path.join(TOOLS, "check_clang"), self.root]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def test_read(self):
        self.assertEqual(self.read("int f(void) { return 1; }\n")[0], 0)
        unused = "int g(void) { int unused; return 1; }\n"
        code, out = self.read("int f(void) { return 1; }\n", unused)
        self.assertEqual(code, 1)
        self.assertIn("unused", out)
        self.assertFalse(os.path.exists(os.path.join(self.root, "x.o")))

    def test_nothing(self):
        self.assertEqual(self.read()[0], 2)


if __name__ == "__main__":
    unittest.main()
