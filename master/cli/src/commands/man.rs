//! `elasticdl man`: the manual pages of all commands.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};

use crate::process::{EXIT_OK, Failure, cannot};

/// Arguments of `elasticdl man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Folder for the pages, created if it does not exist.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}

/// Writes a page for `cli` and one for each of its commands. Returns the exit code.
pub(super) fn man(args: &ManArgs, cli: Command) -> Result<u8, Failure> {
    let at = args.dir.display();
    fs::create_dir_all(&args.dir).map_err(cannot(&format!("create the folder {at}")))?;
    clap_mangen::generate_to(cli, &args.dir).map_err(cannot(&format!("write to {at}")))?;
    Ok(EXIT_OK)
}
