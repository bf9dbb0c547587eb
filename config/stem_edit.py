# A model whose knowledge shall move with its rows, for edit.py: stem_small.py's facts, a table in every layer, and
# token embeddings hidden half of the time, so that tables have to say which token it is.
out_dir = "out/stem_edit"
dataset = "facts"
stem_every = 1
stem_first = 0  # layer 0 too: behind a hidden embedding nothing below it knows the token
wte_dropout = 0.5

batch_size = 8
block_size = 64  # 512 tokens a step
n_layer = 4
n_head = 2
n_embd = 64
d_ff = 192

learning_rate = 6e-3
stem_lr_scale = 3.0
max_iters = 4000
warmup_iters = 100
eval_interval = 500
log_interval = 100
