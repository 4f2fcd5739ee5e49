// Functions of headers that are compiled for several instruction sets.
#pragma once

// Forced inline: the linker keeps one copy of an inline function, and it must not be one that was
// compiled for an instruction set that other callers' CPUs do not have.
#define H2O_INLINE inline __attribute__((always_inline))
