//! The `elasticdl` command. Its implementation is the library [`elasticdl_master`].

use std::process::ExitCode;

fn main() -> ExitCode {
    elasticdl_master::cli::main()
}
