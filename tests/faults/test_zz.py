def test_x(finished_run): print(finished_run)
