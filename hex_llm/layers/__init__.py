"""The mathematics that model families share.

Letters of shapes: `T` tokens, `S` sequences, `B` pages per sequence, `R` rows, `D` embed, `F` mlp, `V` vocab,
`N` query heads, `K` key and value heads, `H` head dim, `P` pages, `E` experts.
"""
