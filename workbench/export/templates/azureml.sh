python -m pip install --quiet -r requirements.txt && python -m torch.distributed.run @{!launch} train.py
