"""The server's step from the mean delta to the next model: the one arithmetic of the coordinator, and of silos that
check it.

Every operation rounds once per element and no element looks at another, so a stretch of a model gives the same bits
alone as in the whole, on every CPU and with any number of threads. Numbers that are no tensors come from additions,
multiplications, divisions and square roots of doubles alone: a library's `pow` differs in the last bit from processor
to processor.
"""
