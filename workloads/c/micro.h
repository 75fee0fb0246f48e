/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Loop, Matrix and Flush of the thesis, section 5.4: batch programs whose use of the core is known.
 * The same programs in Rust, in src/bin/elfen-batch/micro.rs, return the same checksums.
 *
 * Built with -pg, so that each function calls `mcount` at its entry, where a check can be attached.
 */
#ifndef ELFEN_WORKLOADS_MICRO_H
#define ELFEN_WORKLOADS_MICRO_H

#include <stdint.h>

enum { ELFEN_MICRO_SIDE = 5, ELFEN_MICRO_FLUSH_WORDS = 32 * 1024 / sizeof(uint64_t) };

/* Calls an empty function `calls` times. */
uint64_t elfen_micro_loop(uint64_t seed, uint64_t calls);

/* Multiplies a fixed 5x5 matrix with one that changes, `calls` times. */
uint64_t elfen_micro_matrix(uint64_t seed, uint64_t calls);

/* Writes a word into the caller's buffer of 32 KB and then zeros the buffer, `calls` times. */
uint64_t elfen_micro_flush(uint64_t seed, uint64_t calls, uint64_t *buffer);

#endif
