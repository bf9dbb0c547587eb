# The dense twin of stem_small.py: the same settings, every feed-forward layer a matmul.
out_dir = "out/dense_small"
dataset = "facts"
stem_every = 0

batch_size = 16
block_size = 64
n_layer = 4
n_head = 2
n_embd = 32
d_ff = 256

learning_rate = 1.2e-2
stem_lr_scale = 3.0
max_iters = 1500
warmup_iters = 100
eval_interval = 500
