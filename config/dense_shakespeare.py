# The dense twin of stem_shakespeare.py: the same settings, every up-projection a matmul.
out_dir = "out/dense_shakespeare"
dataset = "shakespeare"
stem_every = 0

batch_size = 8
block_size = 64  # 512 tokens a step
n_layer = 4
n_head = 4
n_embd = 64

learning_rate = 3e-3
max_iters = 700
warmup_iters = 50
eval_interval = 350
log_interval = 100
