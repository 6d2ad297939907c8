"""The check of the assembler's output finds what it is there for."""

import pytest
from kernels.sass import unset_in

SOUND = """
        /*0080*/                   ULDC.64 UR28, c[0x0][0x208] ;
        /*0b90*/                   UIADD3 UR8, UP0, UR28, 0x2000, URZ ;
        /*0bd0*/                   UIADD3.X UR9, UP0, UR29, URZ, URZ, UP0, !UPT ;
        /*0c00*/               @P0 LDG.E.U16 R41, desc[UR28][R34.64] ;
        /*1df0*/                   STS.128 [R12+UR8+0x2000], R24 ;
"""


SOUND_SM_100 = """
        /*0080*/                   LDCU.64 UR12, c[0x0][0x358] ;
        /*0090*/                   LDCU.128 UR8, c[0x0][0x3e0] ;
        /*00a0*/                   LDCU UR7, c[0x0][0x3f8] ;
        /*0b90*/                   UIADD3 UR4, UPT, UPT, UR11, UR13, URZ ;
        /*0c00*/                   IMAD.WIDE.U32 R8, R3, UR7, RZ ;
"""


@pytest.mark.parametrize("sound", [SOUND, SOUND_SM_100], ids=["sm_90", "sm_100"])
def test_sound_code_reads_what_it_set(sound):
    assert unset_in(sound) == []


@pytest.mark.parametrize(
    "line",
    [
        "/*0bb0*/ UIADD3 UR38, UP0, UR38, 0x20, URZ ;",
        "/*0c10*/ UIADD3.X UR39, UR39, -0x3ffffff0, URZ, UP0, !UPT ;",
        "/*1df0*/ @!P1 STS.128 [R12+UR11], R24 ;",
    ],
)
def test_a_register_that_was_never_set_is_found(line):
    assert unset_in(SOUND + line) == [line.partition("*/")[2].strip(" ;").removeprefix("@!P1 ")]
