# The paper's 1B model: the shape of Llama 3.2 1B, untied, with a third of its layers STEM. --dry_run=True prints what
# it takes.
out_dir = "out/stem_1b"
dataset = "openwebtext"
stem_every = 3  # layers 2, 5, 8, 11, 14

# 4 sequences x 2,048 tokens x 64 micro-batches = 524,288 tokens a step.
batch_size = 4
block_size = 2048
gradient_accumulation_steps = 64

# Tables: 128,256 tokens x 5 layers x 8,192 = 5.25 B numbers, 21 GB, and 63 GB with their optimizer state.
vocab_size = 128256  # Llama 3's; a dataset of fewer ids leaves the rest unused
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
d_ff = 8192
rope_base = 500000.0

learning_rate = 4e-4
min_lr = 4e-5
max_iters = 17000  # 9 B tokens, once through OpenWebText
warmup_iters = 700
eval_interval = 1000
eval_iters = 50
log_interval = 10
