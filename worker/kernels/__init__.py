"""Operations in C and Triton."""
