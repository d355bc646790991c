# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading

from marin_rl.utils.user_code import shared_object, sharing


def test_programs_in_two_threads_share_objects_of_the_same_name():
    both, found = threading.Barrier(2, timeout=60.0), {}

    def look_up(value: str) -> None:
        with sharing({"reward": value}):
            both.wait()
            found[value] = shared_object("reward")
            both.wait()

    threads = [threading.Thread(target=look_up, args=(value,)) for value in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": "first", "second": "second"}
