// The arguments of a recorded call, in their order, each in a word.
#pragma once

typedef union word {
    long whole;
    void *pointer;
    float real;
    void (*entry)(const union word *arguments);  // the variant of a kernel that takes its arguments as words
} word;
