//! The `elasticdl` command, as a program of the package whose tests start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    elasticdl_cli::main()
}
