out_dir = "out/stem_small"
stem_every = 1
