//! The `elasticdl` command; all of it is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    elasticdl_master::cli::main()
}
