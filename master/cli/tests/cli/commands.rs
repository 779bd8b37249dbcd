//! Commands that need no job: completions, manual pages, files of options, the doctor, conversion.

use std::fs;
use std::io::Read as _;
use std::time::{Duration, Instant};

use crate::Home;

#[test]
fn completions_and_manual_pages_know_every_command() {
    let home = Home::new();
    for shell in ["bash", "fish", "zsh"] {
        let output = home.run(&["completions", shell]);
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        for word in ["doctor", "num-workers", "completions"] {
            assert!(output.stdout.contains(word), "no {word} for {shell}");
        }
    }
    home.run(&["completions", "cmd"]).assert_refused(&["'cmd'", "bash, "]);
    assert_eq!(home.run(&["man", "pages/man1"]).code, Some(0));
    let page = |name: &str| fs::read_to_string(home.path("pages/man1").join(name)).unwrap();
    assert!(page("elasticdl.1").contains("elasticdl\\-train(1)"));
    assert!(page("elasticdl-train.1").contains("\\-\\-num\\-workers"));
    let file = home.path("file");
    fs::write(&file, "").unwrap();
    let output = home.run(&["man", "file/pages"]);
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(output.stderr.starts_with("error: can't create the folder file/pages"));
}

#[test]
fn a_job_starts_from_the_file_that_it_has_printed() {
    let home = Home::new();
    let options = ["--training-data", "d", "--num-workers", "3", "--job-name", "mnist"];
    let printed = home.run(
        &[
            &["train", "--local", "--print-config"],
            &options[..],
            &["--", "/bin/sh", "-c", "exit 3"],
        ]
        .concat(),
    );
    assert_eq!(printed.code, Some(0), "{}", printed.stderr);
    fs::write(home.path("job.toml"), &printed.stdout).unwrap();
    let plan = home.run(&["train", "--config", "job.toml", "--dry-run", "--seed", "7"]);
    assert_eq!(plan.code, Some(0), "{}", plan.stderr);
    for part in ["job mnist ", "/bin/sh -c 'exit 3'", "  workers       3 "] {
        assert!(plan.stdout.contains(part), "no {part:?} in {}", plan.stdout);
    }
    fs::write(home.path("wrong.toml"), "num-worker = 3\n").unwrap();
    home.run(&["train", "--config", "wrong.toml"])
        .assert_refused(&["--config wrong.toml: `num-worker`", "`num-workers`"]);
    fs::write(home.path("wrong.toml"), "num-workers = 0\nlocal = true\n").unwrap();
    let refused = home.run(&["train", "--config", "wrong.toml", "--", "a"]);
    assert_eq!(refused.code, Some(2));
    let first = "the key `num-workers` is in wrong.toml:\nerror: invalid value '0' for";
    assert!(refused.stderr.starts_with(first), "{}", refused.stderr);
}

#[test]
fn a_job_in_the_background_may_come_from_a_file() {
    let home = Home::new();
    let job = "local = true\ndetach = true\ntraining-data = \"d\"\njob-name = \"mnist\"\n\
               program = [\"/bin/sh\", \"-c\", \"exec sleep 100\"]\n";
    fs::write(home.path("job.toml"), job).unwrap();
    let started = home.run(&["train", "--config", "job.toml"]);
    assert_eq!(started.code, Some(0), "{}", started.stderr);
    assert!(started.stdout.contains("runs in the background"), "{}", started.stdout);
    assert_eq!(home.run(&["stop", "mnist"]).code, Some(0));
    let followed = home.run(&["status", "mnist", "--watch"]);
    assert!(followed.stdout.contains("stopped after"), "{}", followed.stdout);
}

#[test]
fn the_doctor_checks_this_machine() {
    let home = Home::new();
    let output = home.run(&["doctor", "--local", "--storage", "models"]);
    assert_eq!(output.code, Some(0), "{}{}", output.stdout, output.stderr);
    let subjects = ["processes", "shared memory", "network", "open files", "GPUs", "job folder"];
    for subject in subjects.iter().chain(&["storage"]) {
        assert!(output.stdout.contains(&format!(" {subject} ")), "no {subject}: {}", output.stdout);
    }
    assert_eq!(home.entries(), [""; 0], "nothing is left");
    let output = home.run(&["doctor", "--local", "--storage", "s3://models/a"]);
    assert_eq!(output.code, Some(2));
    assert!(output.stderr.contains("a job checks s3:// addresses"), "{}", output.stderr);
    let output = home.run(&["doctor", "--local", "--storage", "/proc/models"]);
    assert_eq!(output.code, Some(1), "{}", output.stdout);
    let lines: Vec<&str> = output.stdout.lines().collect();
    let [.., problem, remedy] = &lines[..] else { panic!("{}", output.stdout) };
    assert!(problem.starts_with("problem  storage "), "{problem}");
    assert!(remedy.contains("to do: make /proc/models writable"), "{remedy}");
}

#[test]
fn the_doctor_reports_a_kubeconfig_that_is_wrong() {
    let home = Home::new();
    fs::write(home.path("config"), "clusters: 3\n").unwrap();
    let mut doctor = home.command(&["doctor", "-n", "ml"]);
    doctor.env("KUBECONFIG", home.path("config")).env_remove("KUBERNETES_SERVICE_HOST");
    let output = doctor.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\nproblem  cluster ") && text.contains("to do: correct"), "{text}");
}

#[test]
fn a_conversion_reports_what_its_program_does() {
    let home = Home::new();
    let convert = |program: &[&str]| {
        home.run(&[&["convert", "c/step-1", "m.safetensors", "--"], program].concat())
    };
    convert(&["absent"]).assert_refused(&["the program `absent`", "$PATH"]);
    let asked = "test $ELASTICDL_CONVERT_FROM-$ELASTICDL_CONVERT_TO = c/step-1-m.safetensors && \
                 echo model > m.safetensors";
    let done = format!("{asked} && touch $ELASTICDL_CONVERT_DONE");
    assert_eq!(convert(&["/bin/sh", "-c", &done]).code, Some(0));
    // It may have written something else.
    let other = convert(&["/bin/sh", "-c", asked]);
    assert!(other.code == Some(1) && other.stderr.contains("is it an elasticdl program"));
    let failed = convert(&["/bin/sh", "-c", "echo no >&2; exit 1"]);
    assert_eq!(failed.code, Some(1));
    let expected = "no\nerror: m.safetensors was not written: /bin/sh ended with exit status: 1\n";
    assert_eq!(failed.stderr, expected);
}

#[test]
fn a_directory_that_is_not_utf8_is_refused_and_not_made() {
    use std::os::unix::ffi::OsStrExt as _;
    let home = Home::new();
    let data = ["--training-data", "/etc/hostname"];
    let mut command = home.command(&["train", "--local", data[0], data[1], "--job-dir"]);
    let output = command
        .arg(std::ffi::OsStr::from_bytes(b"job\xff"))
        .args(["--", "/bin/true"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("is not UTF-8; choose"), "{text}");
    assert!(home.entries().is_empty(), "{:?}", home.entries());
}

#[test]
fn of_jobs_that_start_together_with_one_file_of_an_export_one_runs() {
    let home = Home::new();
    let start = |name: &str| {
        let options = ["--local", "--training-data", "/etc/hostname", "--export", "m.safetensors"];
        let mut command = home.command(&["train", "--job-name", name]);
        command.args(options).args(["--", "/bin/sh", "-c", "exec sleep 100"]);
        command.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let mut jobs = ["a", "b", "c", "d"].map(start);
    // A job that runs does not end by itself; all others are refused.
    let (mut refused, mut rest) = (Vec::new(), Vec::from_iter(jobs.iter_mut()));
    let until = Instant::now() + Duration::from_secs(60);
    while refused.len() < 3 && Instant::now() < until {
        rest.retain_mut(|job| match job.try_wait().unwrap() {
            Some(status) => {
                let mut text = String::new();
                job.stderr.take().unwrap().read_to_string(&mut text).unwrap();
                refused.push((status.code(), text));
                false
            }
            None => true,
        });
        std::thread::sleep(Duration::from_millis(10));
    }
    for name in ["a", "b", "c", "d"] {
        let _ = home.run(&["stop", name]);
    }
    drop(rest.into_iter().map(|job| job.wait()).collect::<Vec<_>>());
    assert_eq!(refused.len(), 3, "{refused:?}");
    for (code, text) in refused {
        assert!(
            code == Some(2) && text.contains("it is the file of --export of the job"),
            "{text}"
        );
    }
}

#[test]
fn a_refused_job_leaves_the_summary_of_an_earlier_one_and_does_not_name_it() {
    let home = Home::new();
    let train = |code: &str| {
        let options = ["--local", "--training-data", "/etc/hostname", "--summary", "s.json"];
        let program = ["--replace", "--job-name", "j", "--", "/bin/sh", "-c", code];
        home.run(&[&["train"], &options[..], &program[..]].concat())
    };
    assert_eq!(train("exit 0").code, Some(1));
    let earlier = fs::read(home.path("s.json")).unwrap();
    let refused = train("exit 2");
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(!format!("{}{}", refused.stdout, refused.stderr).contains("s.json"), "{refused:?}");
    assert_eq!(fs::read(home.path("s.json")).unwrap(), earlier);
}

#[test]
fn delete_ended_leaves_running_jobs_which_are_refused_with_the_command_that_stops_them() {
    let home = Home::new();
    let train = |name: &str, code: &str, more: &[&str]| {
        let options = ["train", "--local", "--training-data", "/etc/hostname", "--job-name", name];
        home.run(&[&options[..], more, &["--", "/bin/sh", "-c", code]].concat()).code
    };
    for name in ["a", "b"] {
        assert_eq!(train(name, "exit 0", &[]), Some(1));
    }
    assert_eq!(train("runs", "exec sleep 100", &["--detach"]), Some(0));
    let refused = home.run(&["delete", "runs"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("is running (master process "), "{refused:?}");
    assert!(refused.stderr.contains("first stop it: elasticdl stop "), "{refused:?}");
    let deleted = home.run(&["delete", "--ended"]);
    assert_eq!((deleted.code, deleted.stdout.lines().count()), (Some(0), 2), "{deleted:?}");
    let left = home.run(&["list", "--all", "--json"]).stdout;
    let left: Vec<serde_json::Value> = serde_json::from_str(&left).unwrap();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0]["job"], "runs");
    assert_eq!(home.run(&["stop", "--force", "runs"]).code, Some(0));
}
