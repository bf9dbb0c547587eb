# The third stage after stem_small.py and stem_small_midtrain.py: windows of eight times the length, in which documents
# do not see each other.
out_dir = "out/stem_small_extend"
init_from = "out/stem_small_midtrain/best.pt"
dataset = "needle"  # documents of 1,100 words
doc_mask = True

block_size = 512
batch_size = 4  # 2,048 tokens a step
rope_base = 80000.0  # 8 times what it was, as the length

learning_rate = 6e-4  # restarted, with a warm-up
stem_lr_scale = 10.0
max_iters = 200
warmup_iters = 50
eval_interval = 100
log_interval = 50
