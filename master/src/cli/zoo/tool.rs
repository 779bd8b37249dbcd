//! The container tool that is there.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;

use super::{Failure, print_line};

/// A tool that builds and pushes images.
///
/// In the order in which they are looked for. First those that also run containers, so that an
/// image which was built is at once where its user runs it: docker, for who has it expects it to be
/// used; podman, the same without a daemon; nerdctl, which needs a daemon of its own to build. Then
/// buildah, which does nothing else, on machines that only build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tool {
    /// Docker.
    Docker,
    /// Podman.
    Podman,
    /// nerdctl, for containerd.
    Nerdctl,
    /// Buildah.
    Buildah,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Self::Buildah => "buildah",
            Self::Docker => "docker",
            Self::Nerdctl => "nerdctl",
            Self::Podman => "podman",
        }
    }

    fn find(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path)
            .map(|folder| folder.join(self.name()))
            .find(|file| is_program(file))
    }
}

/// Runs the chosen tool, or the first one there, shows the command, and gives its exit code.
pub(super) fn run(chosen: Option<Tool>, words: Vec<OsString>) -> Result<u8, Failure> {
    let there: Vec<(Tool, PathBuf)> =
        Tool::value_variants().iter().filter_map(|&tool| Some((tool, tool.find()?))).collect();
    let names = |there: &[(Tool, PathBuf)]| {
        there.iter().map(|(tool, _)| tool.name()).collect::<Vec<_>>().join(", ")
    };
    let found = match chosen {
        Some(chosen) => there.iter().find(|(tool, _)| *tool == chosen).ok_or_else(|| {
            let others = match there.is_empty() {
                true => HOW_TO_GET_ONE.into(),
                false => format!("install it, or choose what is there: {}", names(&there)),
            };
            Failure::usage(format!("{} is not in $PATH; {others}", chosen.name()))
        })?,
        None => there.first().ok_or_else(|| {
            Failure::usage(format!(
                "none of docker, podman, nerdctl and buildah is in $PATH; {HOW_TO_GET_ONE}"
            ))
        })?,
    };
    let (tool, program) = found;
    let shown: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    print_line(&format!("+ {} {}", tool.name(), shown.join(" ")));
    let status = Command::new(program)
        .args(&words)
        .status()
        .map_err(|error| Failure::failed(format!("can't run {}: {error}", program.display())))?;
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    let others: Vec<_> = there.iter().filter(|(other, _)| other != tool).cloned().collect();
    if code != 0 && chosen.is_none() && !others.is_empty() {
        print_line(&format!(
            "{} failed; with --tool you can choose another that is there: {}",
            tool.name(),
            names(&others)
        ));
    }
    Ok(u8::try_from(code).unwrap_or(1))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

const HOW_TO_GET_ONE: &str = "install one: a system's packages have podman and buildah (`apt-get install buildah`, \
     `dnf install buildah`), which need no daemon";
