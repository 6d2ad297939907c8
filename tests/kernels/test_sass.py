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


def test_sound_code_reads_what_it_set():
    assert unset_in(SOUND) == []


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
