"""A slow full-recompute reference of the models and their decoding, independent of vLLM and of the package.

It reads like the papers and agrees with the official implementations on the golden data; faster code is
tested against it.
"""
