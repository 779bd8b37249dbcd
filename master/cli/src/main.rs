//! The `elasticdl` command. Its implementation is the library [`elasticdl_cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    elasticdl_cli::main()
}
