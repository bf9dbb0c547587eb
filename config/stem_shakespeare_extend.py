# The third stage after stem_shakespeare.py and stem_shakespeare_midtrain.py: windows of four times the length, in which
# documents do not see each other.
out_dir = "out/stem_shakespeare_extend"
init_from = "out/stem_shakespeare_midtrain/best.pt"
dataset = "topics"
doc_mask = True

block_size = 256
batch_size = 2  # 512 tokens a step, as before
rope_base = 40000.0  # 4 times what it was, as the length

learning_rate = 1e-3  # restarted, with a warm-up
max_iters = 100
warmup_iters = 20
eval_interval = 50
eval_iters = 20
log_interval = 50
