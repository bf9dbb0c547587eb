# GPT-2's small size with a third of its layers STEM, on OpenWebText; python data/openwebtext/prepare.py first.
# For a GPU or several; --dry_run=True prints what it takes.
out_dir = "out/stem_openwebtext"
dataset = "openwebtext"
stem_every = 3  # layers 2, 5, 8, 11

# 12 sequences x 1,024 tokens x 40 micro-batches = 491,520 tokens a step. OpenWebText has 9.0 B: 18,400 steps are
# once through it.
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

# Tables: 50,304 tokens x 4 layers x 2,048 = 412 M numbers, 12 bytes each with their optimizer state: 4.6 GiB. The dense
# part is 156 M (head not tied), 6.3 M less than the twin's: a table replaces a 768 x 2,048 matmul in 4 layers.
vocab_size = 50304  # GPT-2's 50,257, padded to a multiple of 64
n_layer = 12
n_head = 12
n_embd = 768
d_ff = 2048  # 8/3 n_embd

learning_rate = 6e-4
min_lr = 6e-5
max_iters = 18400
warmup_iters = 700
weight_decay = 0.1
eval_interval = 1000
eval_iters = 200
log_interval = 10
