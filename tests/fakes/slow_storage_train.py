"""The demo's training script, its pictures on slow storage.

Waiting for storage takes no core: that more workers are the advice, and that it helps, then does not depend on how busy
the machine is that runs the tests.
"""

import time

from telemetry.demo import train

READ_SECONDS = 0.005

decode = train.PictureFolder.__getitem__


def read_and_decode(folder, index):
    time.sleep(READ_SECONDS)
    return decode(folder, index)


train.PictureFolder.__getitem__ = read_and_decode

if __name__ == "__main__":
    train.main()
