# SPDX-License-Identifier: Apache-2.0
"""check_cuda_build reads what cuobjdump prints, and every limit can be broken."""

import importlib.machinery
import importlib.util
import os
import unittest

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools")
LOADER = importlib.machinery.SourceFileLoader(
    "check_cuda_build", os.path.join(TOOLS, "check_cuda_build")
)
SPEC = importlib.util.spec_from_loader("check_cuda_build", LOADER)
TOOL = importlib.util.module_from_spec(SPEC)
LOADER.exec_module(TOOL)

DECODE = "_Z15pkv_cuda_decodeI10pkv_kv_f16Li{dim}EEv22pkv_cuda_decode_params"
MIB = 1 << 20


def dump(arch, dim, stack=0, local=0, kind="elf"):
    return f"""
Fatbin {kind} code:
================
arch = {arch}
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {DECODE.format(dim=dim)}:
  REG:198 STACK:{stack} SHARED:1152 LOCAL:{local} CONSTANT[0]:880 TEXTURE:0
"""


class Limits(unittest.TestCase):
    def judge(self, text, size=MIB, objects=""):
        kernels, ptx = TOOL.parse("lib", text)
        kernels += TOOL.parse("object", objects)[0]
        return TOOL.check("lib", size, kernels, ptx)

    def test_reads_kernels(self):
        kernels, ptx = TOOL.parse("lib", dump("sm_90a", 64) + dump("sm_80", 128, 8, 4))
        self.assertEqual([k.arch for k in kernels], ["sm_90a", "sm_80"])
        self.assertEqual((kernels[1].stack, kernels[1].local, kernels[1].registers), (8, 4, 198))
        self.assertEqual(TOOL.short(kernels[0].name), "pkv_cuda_decode f16 64")
        self.assertEqual(ptx, set())

    def test_good(self):
        said, bad = self.judge(dump("sm_90a", 64))
        self.assertEqual(bad, [])
        self.assertIn("1 kernels", said[0])

    def test_spills_count_where_it_must_be_fast(self):
        self.assertIn("16 bytes of stack", self.judge(dump("sm_90a", 64, 16))[1][0])
        self.assertIn("4 of local", self.judge(dump("sm_90a", 128, 0, 4))[1][0])
        said, bad = self.judge(dump("sm_90a", 256, 16))
        self.assertEqual(bad, [])
        self.assertTrue(any("not held to it" in line for line in said))

    def test_one_kernel_may_spill_a_little(self):
        def judged(kv, tiles, stack):
            kind = f"{len(kv) + 7}pkv_kv_{kv}Li128ELi{tiles}E"
            name = f"_Z15pkv_cuda_decodeI{kind}Ev22pkv_cuda_decode_params"
            return self.judge(dump("sm_90a", 128, stack).replace(DECODE.format(dim=128), name))[1]

        self.assertEqual(judged("e4m3", 1, 40), [])
        self.assertIn("48 bytes", judged("e4m3", 1, 48)[0])
        self.assertIn("24 bytes", judged("e4m3", 2, 24)[0])
        self.assertIn("24 bytes", judged("f16", 1, 24)[0])

    def test_objects_are_held_to_it(self):
        said, bad = self.judge(dump("sm_90a", 64), objects=dump("sm_86", 64, 8))
        self.assertEqual(len(bad), 1)
        self.assertTrue(any("sm_86" in line for line in said))

    def test_too_many_kernels(self):
        self.assertEqual(self.judge(dump("sm_90a", 256) * 60)[1], [])
        self.assertIn("61 kernels", self.judge(dump("sm_90a", 256) * 61)[1][0])
        self.assertIn("no kernels", self.judge("")[1][0])

    def test_size_a_target(self):
        one, two = dump("sm_90a", 64), dump("sm_90a", 64) + dump("sm_80", 64)
        self.assertEqual(self.judge(one, 30 * MIB)[1], [])
        self.assertIn("at most 30", self.judge(one, 31 * MIB)[1][0])
        self.assertEqual(self.judge(two, 59 * MIB)[1], [])
        ptx = one + "Fatbin ptx code:\n================\narch = sm_90\n"
        self.assertEqual(self.judge(ptx, 59 * MIB)[1], [])

    def test_copies_that_no_device_has(self):
        good = (
            "\t\tFunction : " + DECODE.format(dim=64),
            "  /*69b0*/  LDGSTS.E.BYPASS.128 [R31], desc[UR20][R88.64], !P2 ;",
            "  /*69c0*/  LDGSTS.E.BYPASS.128 [R31+0x1000], desc[UR20][R90.64], !P2 ;",
            "  /*69d0*/  LDS.128 R4, [R31+UR4] ;",
        )
        self.assertEqual(TOOL.impossible(good), [])
        bad = good + ("  /*69e0*/  LDGSTS.E.BYPASS.128 [R31+UR4+0x10], desc[UR1][R90.64] ;",)
        self.assertEqual(
            TOOL.impossible(bad), ["pkv_cuda_decode f16 64: 1 copies LDGSTS [R + UR]"]
        )

    def test_starts_without_a_driver(self):
        line = " 0x0000000000000001 (NEEDED)             Shared library: [{}]\n"
        text = line.format("libxxhash.so.0") + line.format("libc.so.6")
        self.assertEqual(TOOL.needed(text), [])
        for name in ("libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2"):
            self.assertEqual(TOOL.needed(text + line.format(name))[-1], name)


if __name__ == "__main__":
    unittest.main()
