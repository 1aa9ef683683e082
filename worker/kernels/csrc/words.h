// The arguments of a call as they are written down for `replay`: each in a word, in their order.
#pragma once

typedef union word {
    long whole;
    void *pointer;
    float real;
    void (*entry)(const union word *arguments);  // of a kernel that takes its arguments so
} word;
