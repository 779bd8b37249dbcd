//! `kubectl` as a command.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

/// `kubectl`, for the cluster that `$KUBECONFIG` names.
pub fn kubectl() -> Command {
    Command::new("kubectl")
}

/// Runs a command that has to succeed.
pub fn must(command: &mut Command) -> Output {
    let output = command.output().expect("the command starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    output
}

/// `kubectl apply` of a manifest.
pub(super) fn apply(manifest: &str, options: &[&str]) {
    let mut child = kubectl()
        .args(["apply", "-f", "-"])
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kubectl starts");
    let mut stdin = child.stdin.take().expect("it was piped");
    stdin.write_all(manifest.as_bytes()).expect("kubectl reads");
    drop(stdin);
    let output = child.wait_with_output().expect("kubectl ends");
    assert!(output.status.success(), "{}", text(&output));
}

/// Standard output and standard error of a command.
pub fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}
