//! `elasticdl train --local --detach`: runs the same command again, as a process without a
//! terminal.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use elasticdl_master::jobdir::{self, JobDir, directory_of, quoted};

use super::local_job::LocalJob;
use super::request::StartRequest;
use crate::process::{EXIT_FAILED, Failure, cannot, print};

/// Starts the job of this process's arguments in the background, and returns the exit code when its
/// master listens.
pub(super) fn start(request: StartRequest) -> Result<u8, Failure> {
    let mut added: Vec<OsString> = Vec::new();
    let is_quiet = request.output.quiet;
    let is_named = (request.job.job_name.is_some(), request.job.job_dir.is_some());
    let job = LocalJob::new(request)?;
    job.refuse_to_replace()?;
    JobDir::check(&job.job_dir).map_err(|e| Failure::usage(e.to_string()))?;
    // Passes a random name, and the directory that follows from it, on to the master, so that they
    // are those that this process prints.
    if !is_named.0 {
        added.extend(["--job-name".into(), job.spec.name.into()]);
    }
    if !is_named.1 {
        added.extend(["--job-dir".into(), job.job_dir.clone().into()]);
    }
    run_again(&job.job_dir, is_quiet, added)
}

/// Like [`start`], for a job that is resumed.
pub(super) fn resume(job: &Path, is_quiet: bool) -> Result<u8, Failure> {
    run_again(&directory_of(job), is_quiet, Vec::new())
}

/// Runs the command of this process again, with more arguments, and waits for the master in
/// `job_dir`.
fn run_again(job_dir: &Path, is_quiet: bool, mut added: Vec<OsString>) -> Result<u8, Failure> {
    if !is_quiet {
        added.push("--quiet".into());
    }
    let failed = cannot("start the master in the background");
    let mut master = Command::new(std::env::current_exe().map_err(&failed)?)
        .args(arguments(std::env::args_os().skip(1), added))
        .env(DETACHED, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(&failed)?;
    let pid = master.id();
    while !jobdir::look_up(job_dir).is_ok_and(|(endpoint, _)| endpoint.pid == pid) {
        if let Some(status) = master.try_wait().map_err(&failed)? {
            return match status.code() {
                Some(0) => print(&format!("the job in {} has ended\n", job_dir.display())),
                code => Err(refusal(&mut master, code)),
            };
        }
        std::thread::sleep(POLL);
    }
    let job = name_of(job_dir);
    let commands = [
        (format!("status {job} --watch"), "shows it until it ends"),
        (format!("dashboard {job}"), "prints the link of its page"),
        (format!("stop {job}"), "stops it at the end of its step"),
    ];
    let width = commands.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    let lines = commands.map(|(command, what)| format!("  elasticdl {command:width$}   {what}\n"));
    print(&format!(
        "the job in {} runs in the background; its master is process {pid}\n{}",
        job_dir.display(),
        lines.concat()
    ))
}

/// Gives this process a session of its own if it was started in the background, so that it survives
/// its terminal.
pub(super) fn leave_terminal() -> Result<(), Failure> {
    if is_background() {
        rustix::process::setsid().map_err(|e| cannot("leave the terminal's session")(e.into()))?;
    }
    Ok(())
}

/// Whether this process was started in the background.
pub(super) fn is_background() -> bool {
    let starter = std::env::var(DETACHED).ok().and_then(|pid| pid.parse().ok());
    // The variable alone is not enough: child processes inherit it.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    starter.is_some() && starter == parent
}

/// The arguments for the master: `given` without --detach, and `added`, before the program.
fn arguments(given: impl Iterator<Item = OsString>, added: Vec<OsString>) -> Vec<OsString> {
    let mut given = given.peekable();
    let mut arguments = Vec::new();
    while let Some(argument) = given.next_if(|argument| argument != "--") {
        if argument != "--detach" {
            arguments.push(argument);
        }
    }
    arguments.extend(added);
    arguments.extend(given);
    arguments
}

/// Error output of a master that exited before it listened.
fn refusal(master: &mut Child, code: Option<i32>) -> Failure {
    let mut output = String::new();
    if let Some(mut stderr) = master.stderr.take() {
        // A partial output is better than none.
        let _ = stderr.read_to_string(&mut output);
    }
    let output = output.trim();
    // The last line, if lines are objects.
    let line = output.lines().next_back().and_then(|line| serde_json::from_str(line).ok());
    let line: serde_json::Value = line.unwrap_or_default();
    let text = output.strip_prefix("error: ").unwrap_or(output);
    let text = line["text"].as_str().unwrap_or(text);
    let text = if text.is_empty() { "the master exited without an error message" } else { text };
    Failure {
        code: code.and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_FAILED),
        text: text.into(),
    }
}

/// Name by which commands find the job in this directory.
pub(super) fn name_of(job_dir: &Path) -> String {
    if let Some(name) = job_dir.file_name().filter(|name| directory_of(Path::new(name)) == job_dir)
    {
        return name.display().to_string();
    }
    quoted(&std::path::absolute(job_dir).unwrap_or_else(|_| PathBuf::from(job_dir)))
}

/// Environment variable with the process id of the command that started this process in the
/// background.
const DETACHED: &str = "ELASTICDL_DETACHED_BY";
const POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_master_gets_the_arguments_of_the_command() {
        let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let given = words("train --local --detach --training-data d -- model --detach");
        let expected =
            words("train --local --training-data d --quiet --job-name j -- model --detach");
        assert_eq!(arguments(given.into_iter(), words("--quiet --job-name j")), expected);
        let expected = words("train --resume j --quiet");
        assert_eq!(
            arguments(words("train --resume j --detach").into_iter(), words("--quiet")),
            expected
        );
    }

    #[test]
    fn a_job_is_named_so_that_commands_find_it() {
        assert_eq!(name_of(&jobdir::default_root().join("mnist")), "mnist");
        assert_eq!(name_of(Path::new("/data/my job")), "'/data/my job'");
    }
}
