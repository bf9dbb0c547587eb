# The dense twin of stem_shakespeare_char.py: the same settings, every up-projection a matmul.
out_dir = "out/dense_shakespeare_char"
dataset = "shakespeare_char"
stem_every = 0

batch_size = 12
block_size = 64  # 768 tokens a step, nanoGPT's settings for a CPU
n_layer = 4
n_head = 4
n_embd = 128

learning_rate = 2e-3
max_iters = 2000
warmup_iters = 100
eval_interval = 500
log_interval = 100
