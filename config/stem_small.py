# STEM in every second layer, on generated facts. Its dense twin is dense_small.py.
out_dir = "out/stem_small"
dataset = "facts"
stem_every = 2

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
