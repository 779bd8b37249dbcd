//! `elasticdl completions`.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::process::{Failure, print};

/// Arguments of `elasticdl completions`.
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Prints the script that completes `cli` in a shell. Returns the exit code.
pub(super) fn completions(args: &CompletionsArgs, mut cli: Command) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli, "elasticdl", &mut script);
    print(&String::from_utf8_lossy(&script))
}

const AFTER_HELP: &str = "\
Where to put the script:
  bash  elasticdl completions bash > ~/.local/share/bash-completion/completions/elasticdl
  fish  elasticdl completions fish > ~/.config/fish/completions/elasticdl.fish
  zsh   elasticdl completions zsh > DIR/_elasticdl, where DIR is a folder of $fpath

`elasticdl man ~/.local/share/man/man1` writes the manual pages: `man elasticdl-train`.";
