from workbench.shared.magic_args import cluster_parser, parse_cluster_line


def test_cluster_lines_are_read():
    line = parse_cluster_line("start 4 --devices 0,1 --launcher slurm")
    assert (line.action, line.count, line.devices, line.launcher) == ("start", 4, "0,1", "slurm")
    assert parse_cluster_line("").action == "status"
    assert parse_cluster_line("restart 0 2-3").ranks == (0, 2, 3)
    assert parse_cluster_line("logs 1  # why?").ranks == (1,)


def test_help_names_the_actions():
    assert "restart" in cluster_parser().format_help()
