/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * libelfen_return.a: the return of all functions built with -mfunction-return=thunk-extern.
 *
 * Contains a `ret` and bytes to overwrite. Under `elfen shim` the preload library finds this
 * section in the program's file. Before the program starts, it replaces the section by code that
 * tags the return. The bytes identify this library and equal RETURN in elfen-instrument/entries.
 * The symbol is hidden, so that each library of a program has its own.
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
