//! Container tools: detection and execution.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;

use crate::process::{Failure, print_line};

/// A tool that builds and pushes images.
///
/// The variants are in the order of detection. Tools that also run containers come first, so that a
/// built image is directly available to run: docker, the usual choice where it is installed;
/// podman, the same without a daemon; nerdctl, which needs a daemon of its own to build. The last
/// is buildah, for machines that only build images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tool {
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

/// Prints and runs the command with the chosen tool, or the first that is installed. Returns its
/// exit code.
pub(super) fn run(chosen: Option<Tool>, words: Vec<OsString>) -> Result<u8, Failure> {
    let installed: Vec<(Tool, PathBuf)> =
        Tool::value_variants().iter().filter_map(|&tool| Some((tool, tool.find()?))).collect();
    let names = |tools: &[(Tool, PathBuf)]| {
        tools.iter().map(|(tool, _)| tool.name()).collect::<Vec<_>>().join(", ")
    };
    let found = match chosen {
        Some(chosen) => installed.iter().find(|(tool, _)| *tool == chosen).ok_or_else(|| {
            let others = if installed.is_empty() {
                INSTALL_HINT.into()
            } else {
                format!("install it, or choose an installed one: {}", names(&installed))
            };
            Failure::usage(format!("{} is not in $PATH; {others}", chosen.name()))
        })?,
        None => installed.first().ok_or_else(|| {
            Failure::usage(format!(
                "none of docker, podman, nerdctl and buildah is in $PATH; {INSTALL_HINT}"
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
    let others: Vec<_> = installed.iter().filter(|(other, _)| other != tool).cloned().collect();
    if code != 0 && chosen.is_none() && !others.is_empty() {
        print_line(&format!(
            "{} failed; --tool can select another installed tool: {}",
            tool.name(),
            names(&others)
        ));
    }
    Ok(u8::try_from(code).unwrap_or(1))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

const INSTALL_HINT: &str = "install one: distributions package podman and buildah \
    (`apt-get install buildah`, `dnf install buildah`), which need no daemon";
