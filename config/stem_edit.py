# A model whose knowledge moves with its rows, for edit.py: stem_small.py's facts, one layer with a table, and token
# embeddings hidden now and then, so that the table has to say which token it is.
out_dir = "out/stem_edit"
dataset = "facts"
stem_every = 3  # of four layers: layer 2
wte_dropout = 0.15

batch_size = 8
block_size = 64  # 512 tokens a step
n_layer = 4
n_head = 2
n_embd = 64
d_ff = 192

learning_rate = 6e-3
stem_lr_scale = 3.0
max_iters = 2300
warmup_iters = 100
eval_interval = 500
log_interval = 100
