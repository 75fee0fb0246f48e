/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What functions return by that are built with -mfunction-return=thunk-extern: libelfen_return.a.
 *
 * A `ret`, and room behind it. Under `elfen shim` the preload library finds the section in the
 * program's file and writes there, before the program starts, that a function returns; the bytes
 * say whose room it is, and are those of RETURN in elfen-instrument/entries. Hidden: each library
 * of a program has one of its own.
 */
	.section elfen_return, "ax", @progbits
	.balign 32
	.globl __x86_return_thunk
	.hidden __x86_return_thunk
	.type __x86_return_thunk, @function
__x86_return_thunk:
	.cfi_startproc
	ret
	.ascii "elfen return thunk, version 1"
	.byte 0xcc, 0xcc
	.cfi_endproc
	.size __x86_return_thunk, . - __x86_return_thunk
	.section .note.GNU-stack, "", @progbits
