# STEM in every second layer, on Shakespeare's plays as GPT-2's byte pairs; python data/shakespeare/prepare.py first.
# The dense twin is dense_shakespeare.py.
out_dir = "out/stem_shakespeare"
dataset = "shakespeare"
stem_every = 2

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
