# The second stage after stem_1b.py: another mix of data, the schedule continued. Shape, weights and the moments of rows
# are the checkpoint's; those of dense weights start anew.
out_dir = "out/stem_1b_midtrain"
init_from = "out/stem_1b/best.pt"
dataset = "midtrain"  # your documents: python data/openwebtext/prepare.py --input=FILE --folder=data/midtrain

batch_size = 4
gradient_accumulation_steps = 64  # 524,288 tokens a step; block_size 2,048 is the checkpoint's

learning_rate = 4e-5  # where stem_1b.py ended, and on down; a restarted schedule would warm up to more
min_lr = 4e-6
warmup_iters = 0
max_iters = 2000  # 1.0 B tokens
eval_interval = 500
log_interval = 10
