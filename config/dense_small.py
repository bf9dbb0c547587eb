# The dense twin of stem_small.py: the same settings, every up-projection a matmul.
out_dir = "out/dense_small"
dataset = "facts"
stem_every = 0

batch_size = 8
block_size = 64  # 512 tokens a step
n_layer = 4
n_head = 2
n_embd = 64
d_ff = 192

learning_rate = 1.8e-3
stem_lr_scale = 10.0
max_iters = 2300
warmup_iters = 100
eval_interval = 500
log_interval = 100
