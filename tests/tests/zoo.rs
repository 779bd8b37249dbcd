//! A crate and a project written by `elasticdl zoo init` build, pass their tests and train;
//! container tools are called correctly.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use elasticdl_tests::Command as Job;
use elasticdl_tests::cluster::text;
use tempfile::TempDir;

const ELASTICDL: &str = env!("CARGO_BIN_EXE_elasticdl-under-test");

fn root() -> PathBuf {
    fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap()
}

/// A scaffolded crate that depends on elasticdl in this checkout.
fn scaffold(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("my-line");
    let made = init(&path, &["--elasticdl", root().to_str().unwrap()]);
    assert!(made.status.success(), "{}", text(&made));
    path
}

fn init(path: &Path, options: &[&str]) -> Output {
    Command::new(ELASTICDL).args(["zoo", "init"]).arg(path).args(options).output().unwrap()
}

/// Runs cargo in the crate, with the dependencies of this workspace: its versions, its target
/// folder, and no line tables, as its profile has it for dependencies: none is built again.
fn cargo(crate_path: &Path, command: &str) -> Command {
    fs::copy(root().join("Cargo.lock"), crate_path.join("Cargo.lock")).unwrap();
    let target = Path::new(ELASTICDL).ancestors().nth(2).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([command, "--offline"]).current_dir(crate_path);
    cargo.env("CARGO_TARGET_DIR", target).env("CARGO_PROFILE_DEV_DEBUG", "0");
    // Those of this test's package, by which build scripts would seem to have been run for another.
    let of_package = ["CARGO_MANIFEST_", "CARGO_PKG_"];
    for (name, _) in std::env::vars_os() {
        if of_package.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            cargo.env_remove(name);
        }
    }
    cargo
}

#[test]
fn a_new_crate_passes_its_tests_and_trains() {
    let folder = tempfile::tempdir().unwrap();
    let path = scaffold(&folder);
    let tested = cargo(&path, "test").output().unwrap();
    assert!(tested.status.success() && text(&tested).contains("2 passed"), "{}", text(&tested));
    let built = cargo(&path, "build").output().unwrap();
    assert!(built.status.success(), "{}", text(&built));
    // As the crate's README says, but for the profile.
    let program = Path::new(ELASTICDL).with_file_name("my-line");
    let job = Job::new(ELASTICDL, folder.path().join("job"), [&program])
        .option("num-workers", "2")
        .option("training-data", path.join("data"))
        .option("num-epochs", "20");
    let ended = job.run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let line = ended.summary().model_summary.as_deref();
    // y = 2x - 0.5, as nearly as 20 epochs come.
    let near = ["0.49", "0.50", "0.51"].map(|bias| format!("y = 2.00·x - {bias}"));
    let is_near = line.is_some_and(|line| near.iter().any(|near| near == line));
    assert!(is_near, "{}", ended.output);
    // A setting out of range is refused.
    let wrong = [program.as_os_str(), "--learning-rate=-1".as_ref()];
    let job = Job::new(ELASTICDL, folder.path().join("wrong"), wrong)
        .option("num-workers", "1")
        .option("training-data", path.join("data"));
    let ended = job.run();
    assert_eq!((ended.code, ended.summary().steps), (Some(2), 0), "{}", ended.output);
    let expected = "optimizer() failed: learning_rate is -1, but must be at least 0 and finite";
    assert!(ended.output.contains(expected), "{}", ended.output);
    fs::remove_file(program).unwrap();
}

/// The examples, which are built and tested, are the sources of the templates.
#[test]
fn a_template_is_its_example_without_the_tests() {
    let modules =
        [("charlm", "network"), ("ctr", "data"), ("mnist", "network"), ("tabular", "machine")];
    for (example, module) in modules {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let made = init(&path, &["--template", example]);
        assert!(made.status.success(), "{}", text(&made));
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert!(path.join(format!("src/{module}.rs")).is_file());
        let main = read(path.join("src/main.rs"));
        assert!(main.contains("\nfn main()") && !main.contains("cfg(test)"), "{main}");
        let readme = read(path.join("README.md"));
        assert!(readme.starts_with("# model\n") && !readme.contains("{{"), "{readme}");
        assert_eq!(path.join("data/clicks.csv").exists(), example == "tabular");
        assert_eq!(path.join("data/train.csv").exists(), example == "ctr");
    }
    let folder = tempfile::tempdir().unwrap();
    let refused = init(folder.path(), &["--template", "resnet"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text(&refused).contains("charlm, ctr, linear, mnist, python, tabular"),
        "{}",
        text(&refused)
    );
}

#[test]
fn nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("my-line");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("README.md"), "mine").unwrap();
    let refused = init(&path, &[]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused));
    assert!(text(&refused).contains("has README.md already"), "{}", text(&refused));
    let left: Vec<_> =
        fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["README.md"]);
    assert_eq!(fs::read_to_string(path.join("README.md")).unwrap(), "mine");
    let unnamed = init(&folder.path().join("My Line"), &[]);
    assert_eq!(unnamed.status.code(), Some(2), "{}", text(&unnamed));
    assert!(text(&unnamed).contains("--name NAME"), "{}", text(&unnamed));
}

/// A folder with fake container tools that record their arguments, and end with this code.
fn tools(names: &[&str], code: u8) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let log = folder.path().join("log");
        let script = format!("#!/bin/sh\necho {name} \"$@\" >> {}\nexit {code}\n", log.display());
        let file = folder.path().join(name);
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

/// Runs `elasticdl zoo ARGS` with only `tools` in the path; returns the exit code, the output, and
/// the arguments that the tools got.
fn zoo(tools: &TempDir, args: &[&str]) -> (i32, String, String) {
    let output =
        Command::new(ELASTICDL).arg("zoo").args(args).env("PATH", tools.path()).output().unwrap();
    let calls = fs::read_to_string(tools.path().join("log")).unwrap_or_default();
    let _ = fs::remove_file(tools.path().join("log"));
    (output.status.code().unwrap(), text(&output), calls)
}

#[test]
fn a_container_tool_builds_and_pushes_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = scaffold(&folder);
    let path = path.to_str().unwrap();
    let root = root();
    let root = root.to_str().unwrap();
    let words = format!(
        "build --tag team/line:1 --build-arg BASE=mine --build-context elasticdl={root} \
         --file {path}/Dockerfile {path}\n"
    );
    let build = ["build", path, "--image", "team/line:1", "--build-arg", "BASE=mine"];
    // Each tool is chosen if those before it do not exist.
    let order = ["docker", "podman", "nerdctl", "buildah"];
    for first in 0..order.len() {
        let tools = tools(&order[first..], 0);
        let (code, printed, calls) = zoo(&tools, &build);
        assert_eq!((code, calls), (0, format!("{} {words}", order[first])), "{printed}");
        assert!(printed.contains(&format!("+ {} {words}", order[first])), "{printed}");
    }
    let tools = tools(&order, 0);
    let (code, printed, calls) = zoo(&tools, &["push", "team/line:1", "--tool", "nerdctl"]);
    assert_eq!((code, calls.as_str()), (0, "nerdctl push team/line:1\n"), "{printed}");
    // A crate that depends on a published elasticdl needs no checkout.
    let other = folder.path().join("other");
    assert!(init(&other, &["--elasticdl", "0.1"]).status.success());
    let (_, printed, calls) =
        zoo(&tools, &["build", other.to_str().unwrap(), "--image", "team/line:1"]);
    assert!(calls.starts_with("docker build") && !calls.contains("context"), "{calls}{printed}");
}

#[test]
fn the_output_of_a_container_tool_is_forwarded_and_its_absence_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = scaffold(&folder);
    let build = ["build", path.to_str().unwrap(), "--image", "line"];
    let (code, printed, _) = zoo(&tools(&["docker", "buildah"], 7), &build);
    assert_eq!(code, 7);
    assert!(printed.contains("--tool") && printed.contains("buildah"), "{printed}");
    let (code, printed, _) = zoo(&tools(&[], 0), &build);
    assert_eq!(code, 2);
    assert!(printed.contains("none of docker, podman, nerdctl and buildah"), "{printed}");
    assert!(printed.contains("apt-get install buildah"), "{printed}");
    let (code, printed, calls) = zoo(&tools(&["podman"], 0), &["push", "line", "--tool", "docker"]);
    assert_eq!((code, calls.as_str()), (2, ""));
    assert!(printed.contains("docker is not in $PATH") && printed.contains("podman"), "{printed}");
    let empty = tempfile::tempdir().unwrap();
    let (code, printed, _) =
        zoo(&tools(&["podman"], 0), &["build", empty.path().to_str().unwrap(), "--image", "line"]);
    assert_eq!(code, 2);
    assert!(printed.contains("Dockerfile") && printed.contains("elasticdl zoo init"), "{printed}");
}
