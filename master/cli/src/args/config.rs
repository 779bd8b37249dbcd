//! Options from a file: `--config FILE`, and `--print-config`.
//!
//! The keys of the file are the long names of options. The file takes the place of `--config` on
//! the command line, before it is parsed, so that its values are checked as those of the command
//! line are. An option that is also on the command line is taken from there.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::Path;

use clap::error::ContextKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::process::{Failure, read_text};

/// The arguments of a command, with those of its file of options.
#[derive(Debug, PartialEq)]
pub(crate) struct Arguments {
    /// All arguments, from the name of the program on.
    pub(crate) all: Vec<OsString>,
    /// The file, and the options that come from it.
    from_file: Option<(String, Vec<String>)>,
}

impl Arguments {
    /// Replaces `--config FILE` in `given` with what the file has. `cli`: the whole command line.
    ///
    /// # Errors
    /// The file can't be read, or it is not one of options.
    pub(crate) fn read(given: Vec<OsString>, cli: &Command) -> Result<Self, Failure> {
        let command = given.get(1).and_then(|name| cli.find_subcommand(name));
        let takes_file = |command: &&Command| option(command, CONFIG).is_some();
        let Some(command) = command.filter(takes_file) else { return Ok(Self::of(given)) };
        let end = given.iter().position(|word| word == "--").unwrap_or(given.len());
        let (own, program) = given.split_at(end);
        let [(at, words, file)] = config_options(own)[..] else {
            // Without a file, or with several, which clap refuses.
            return Ok(Self::of(given));
        };
        let table = read_table(Path::new(file))?;
        let refuse = |why: String| Failure::usage(format!("--config {}: {why}", file.display()));
        let (options, program) =
            Options::collect(command, own, program.to_vec(), table).map_err(refuse)?;
        let before = own[..at].iter().cloned().chain(options.words);
        let all = before.chain(own[at + words..].iter().cloned()).chain(program).collect();
        Ok(Self { all, from_file: Some((file.display().to_string(), options.keys)) })
    }

    /// The arguments of `command` that stand for `table`, the options that `origin` has.
    ///
    /// # Errors
    /// They are not options.
    pub(crate) fn of_table(command: &Command, origin: &str, table: Table) -> Result<Self, Failure> {
        let (options, program) = Options::collect(command, &[], Vec::new(), table)
            .map_err(|why| Failure::usage(format!("{origin}: {why}")))?;
        let start = ["elasticdl", command.get_name()].map(OsString::from);
        let all = start.into_iter().chain(options.words).chain(program).collect();
        Ok(Self { all, from_file: Some((origin.into(), options.keys)) })
    }

    fn of(all: Vec<OsString>) -> Self {
        Self { all, from_file: None }
    }

    /// Says where the option comes from that `error` is about, if it is the file.
    pub(crate) fn origin(&self, error: &clap::Error) -> Option<String> {
        let (file, keys) = self.from_file.as_ref()?;
        let about = error.get(ContextKind::InvalidArg)?.to_string();
        let about = about.split([' ', '=']).next()?.strip_prefix("--")?;
        keys.iter().any(|key| key == about).then(|| format!("the key `{about}` is in {file}"))
    }
}

/// Collects the arguments that stand for keys of a file.
struct Options<'a> {
    command: &'a Command,
    /// Arguments of the command line.
    own: &'a [OsString],
    words: Vec<OsString>,
    keys: Vec<String>,
}

impl<'a> Options<'a> {
    /// Collects the options of `table`, and its program if the command line has none, after `--`.
    fn collect(
        command: &'a Command,
        own: &'a [OsString],
        mut program: Vec<OsString>,
        table: Table,
    ) -> Result<(Self, Vec<OsString>), String> {
        let mut options = Self { command, own, words: Vec::new(), keys: Vec::new() };
        for (key, value) in table {
            if key == PROGRAM {
                let words = strings(&key, value)?;
                if program.is_empty() {
                    program.push("--".into());
                    program.extend(words.into_iter().map(OsString::from));
                }
            } else {
                options.add(key, value)?;
            }
        }
        Ok((options, program))
    }

    fn add(&mut self, key: String, value: Value) -> Result<(), String> {
        let Some(arg) = option(self.command, &key).filter(|_| !NOT_IN_FILE.contains(&&*key)) else {
            return Err(self.unknown(&key));
        };
        let words = match (value, arg.get_action()) {
            (Value::Boolean(false), ArgAction::SetTrue) => Vec::new(),
            (Value::Boolean(true), ArgAction::SetTrue) => vec![format!("--{key}")],
            (_, ArgAction::SetTrue) => return Err(format!("`{key}` must be true or false")),
            (Value::Array(values), ArgAction::Append) => {
                let texts = values.into_iter().map(|value| scalar(&key, value));
                let texts = texts.collect::<Result<Vec<String>, String>>()?;
                texts.into_iter().map(|text| format!("--{key}={text}")).collect()
            }
            (value, _) => vec![format!("--{key}={}", scalar(&key, value)?)],
        };
        if !self.is_given(arg) {
            self.words.extend(words.into_iter().map(OsString::from));
            self.keys.push(key);
        }
        Ok(())
    }

    /// Whether the command line has an option.
    fn is_given(&self, arg: &Arg) -> bool {
        let is_long = |name: &str| {
            self.own.iter().filter_map(|word| word.to_str()?.strip_prefix("--")).any(|word| {
                word.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
            })
        };
        let is_short = |name: char| {
            let mut shorts = self.own.iter().filter_map(|word| word.to_str()?.strip_prefix('-'));
            shorts.any(|word| word.starts_with(name))
        };
        arg.get_long().is_some_and(is_long) || arg.get_short().is_some_and(is_short)
    }

    fn unknown(&self, key: &str) -> String {
        let names = self.command.get_arguments().filter(|arg| !arg.is_hide_set());
        let names = names.filter_map(|arg| arg.get_long()).chain([PROGRAM]);
        let names = names.filter(|name| !NOT_IN_FILE.contains(name));
        let likeness = |name: &str| strsim::jaro_winkler(name, key);
        let nearest = names.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        let nearest = nearest.filter(|name| likeness(name) >= LIKENESS_MIN);
        let meant =
            nearest.map(|name| format!("; is `{name}` meant?")).unwrap_or_else(|| ".".into());
        let command = self.command.get_name();
        format!(
            "`{key}` is not a key{meant} The keys are `{PROGRAM}` and the long options of \
             `elasticdl {command} --help-all`"
        )
    }
}

/// Likeness from which on another key is likely to be meant.
const LIKENESS_MIN: f64 = 0.8;

/// The options that `matches` of `command` has from the command line, as the text of a file.
pub(crate) fn to_file(command: &Command, matches: &ArgMatches) -> Result<String, Failure> {
    let mut text = format!(
        "# Options of `elasticdl {0}`; what is not here has the default of \
         `elasticdl {0} --help-all`.\n# Use: elasticdl {0} --config FILE\n",
        command.get_name()
    );
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let raw: Vec<&OsStr> = matches.get_raw(id).into_iter().flatten().collect();
        let values = raw.iter().map(|word| to_value(word)).collect::<Result<Vec<_>, _>>()?;
        let (key, value) = match arg.get_long() {
            Some(key) if NOT_IN_FILE.contains(&key) => continue,
            Some(key) if matches!(arg.get_action(), ArgAction::SetTrue) => {
                (key, Value::Boolean(true))
            }
            Some(key) if matches!(arg.get_action(), ArgAction::Append) => {
                (key, Value::Array(values))
            }
            Some(key) => (key, values.into_iter().next().unwrap_or_else(|| "".into())),
            None if id == PROGRAM => {
                let words = raw.iter().map(|word| Ok(Value::String(to_str(word)?.into())));
                (PROGRAM, Value::Array(words.collect::<Result<_, Failure>>()?))
            }
            None => continue,
        };
        writeln!(text, "{key} = {value}").expect("a string takes any text");
    }
    Ok(text)
}

/// The places of `--config` in `own`: its index, its number of words, and the file.
fn config_options(own: &[OsString]) -> Vec<(usize, usize, &OsStr)> {
    let mut found = Vec::new();
    for (index, word) in own.iter().enumerate() {
        let inline = word.to_str().and_then(|word| word.strip_prefix("--config="));
        if let Some(file) = inline {
            found.push((index, 1, OsStr::new(file)));
        } else if word == "--config"
            && let Some(file) = own.get(index + 1)
        {
            found.push((index, 2, file.as_os_str()));
        }
    }
    found
}

fn read_table(path: &Path) -> Result<Table, Failure> {
    let refuse = |why: &dyn std::fmt::Display| {
        Failure::usage(format!(
            "--config {}: {why}; it must be a TOML file, as `--print-config` writes one",
            path.display()
        ))
    };
    let text = read_text(path).map_err(|error| refuse(&error))?;
    text.parse::<Table>().map_err(|error| refuse(&error.to_string().trim_end()))
}

fn option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(name))
}

/// A value as the text of an argument.
fn scalar(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(_) => Err(format!("`{key}` must have a value, not true or false")),
        Value::Array(_) => Err(format!("`{key}` must have one value, not a list")),
        Value::Datetime(_) | Value::Table(_) => {
            Err(format!("`{key}` must be text or a number, not a date or a table"))
        }
    }
}

/// The words of a list of texts.
fn strings(key: &str, value: Value) -> Result<Vec<String>, String> {
    let wanted = || format!("`{key}` must be a list of texts, for example [\"./mnist\", \"-v\"]");
    let Value::Array(values) = value else { return Err(wanted()) };
    let text = |value: Value| value.as_str().map(str::to_owned).ok_or_else(wanted);
    values.into_iter().map(text).collect()
}

/// An argument as a value: a number where it is written as TOML writes it.
fn to_value(word: &OsStr) -> Result<Value, Failure> {
    let text = to_str(word)?;
    let number = text.parse::<i64>().ok().filter(|number| number.to_string() == text);
    Ok(number.map_or_else(|| Value::String(text.into()), Value::Integer))
}

fn to_str(word: &OsStr) -> Result<&str, Failure> {
    word.to_str().ok_or_else(|| {
        Failure::usage(format!("--print-config: {} is not UTF-8, as TOML is", word.display()))
    })
}

const CONFIG: &str = "config";
/// Options that select what the command does, not how the job runs.
const NOT_IN_FILE: [&str; 6] = ["config", "help", "help-all", "print-config", "resume", "version"];
const PROGRAM: &str = "program";

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _};

    use super::*;
    use crate::commands::Cli;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    /// The arguments of `line`, in which `FILE` is a file with `text`.
    fn read(line: &str, text: &str) -> Result<Arguments, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        let path = file.path().to_str().unwrap();
        let given = words(&line.replace("FILE", path));
        let mut cli = Cli::command();
        cli.build();
        Arguments::read(given, &cli).map_err(|e| e.text.replace(path, "FILE"))
    }

    const JOB: &str = r#"
        local = true
        num-workers = 4
        training-data = "data/mnist"
        detach = false
        seed = 7
        checkpoint-every = "2min"
        program = ["./mnist", "--hidden", "6 4"]
    "#;

    #[test]
    fn a_file_stands_for_the_options_that_it_has() {
        let arguments = read("elasticdl train --config FILE --num-epochs 2", JOB).unwrap().all;
        let mut expected = words(
            "elasticdl train --checkpoint-every=2min --local --num-workers=4 --seed=7 \
             --training-data=data/mnist --num-epochs 2 -- ./mnist --hidden",
        );
        expected.push("6 4".into());
        assert_eq!(arguments, expected);
        assert!(Cli::command().try_get_matches_from(arguments).is_ok());
    }

    #[test]
    fn the_command_line_comes_before_the_file() {
        let arguments =
            read("elasticdl train --config=FILE --num-workers=9 --seed 1 -- ./other", JOB).unwrap();
        let expected = words(
            "elasticdl train --checkpoint-every=2min --local --training-data=data/mnist \
             --num-workers=9 --seed 1 -- ./other",
        );
        assert_eq!(arguments.all, expected);
        let text = "channels = 2\nquiet = true\nenv = ['A=1', 'B=2']";
        let arguments = read("elasticdl train --config FILE --channels 3 -q", text).unwrap().all;
        assert_eq!(arguments, words("elasticdl train --env=A=1 --env=B=2 --channels 3 -q"));
        for line in ["elasticdl status --config j", "elasticdl train --local -- a --config j"] {
            assert_eq!(read(line, JOB).unwrap().all, words(line), "{line}");
        }
    }

    #[test]
    fn a_key_or_a_value_that_is_none_is_refused_with_what_would_be_right() {
        for (text, parts) in [
            ("num-worker = 4", &["`num-worker`", "`num-workers`"][..]),
            ("num_workers = 4", &["`num_workers`", "`num-workers`"]),
            ("programm = ['a']", &["`programm`", "`program`"]),
            ("resume = 'job'", &["`resume` is not a key"]),
            ("config = 'job'", &["`config` is not a key"]),
            ("local = 'yes'", &["`local` must be true or false"]),
            ("num-workers = true", &["`num-workers` must have a value"]),
            ("num-workers = [1]", &["`num-workers` must have one value"]),
            ("num-workers = {a = 1}", &["`num-workers`", "not a date or a table"]),
            ("[train]\nlocal = true", &["`train` is not a key"]),
            ("program = './mnist'", &["`program` must be a list", "[\"./mnist\""]),
            ("local", &["line 1", "--print-config"]),
        ] {
            let error = read("elasticdl train --config FILE", text).unwrap_err();
            assert!(error.starts_with("--config FILE: "), "{error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
        }
        let error = read("elasticdl train --config /nowhere/j.toml", "").unwrap_err();
        assert!(error.contains("/nowhere/j.toml: No such file"), "{error}");
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_file() {
        let arguments = read("elasticdl train --config FILE --seed x", "num-workers = 0").unwrap();
        let error = Cli::command().try_get_matches_from(&arguments.all).unwrap_err();
        let origin = arguments.origin(&error).unwrap();
        assert!(origin.starts_with("the key `num-workers` is in /"), "{origin}");
        let arguments = read("elasticdl train --config FILE --seed x", "channels = 1").unwrap();
        let error = Cli::command().try_get_matches_from(&arguments.all).unwrap_err();
        assert_eq!(arguments.origin(&error), None);
    }

    #[test]
    fn a_printed_file_is_the_same_job() {
        let line = "elasticdl train --local --training-data d --num-workers 3 --seed \
                    18446744073709551615 --shuffle record --quiet -- ./mnist --lr 0.1";
        let printed = |arguments: &[OsString]| {
            let mut cli = Cli::command();
            cli.build();
            let matches = Cli::command().try_get_matches_from(arguments).unwrap();
            let (name, matches) = matches.subcommand().unwrap();
            to_file(cli.find_subcommand(name).unwrap(), matches).map_err(|e| e.text).unwrap()
        };
        let text = printed(&words(line));
        assert!(text.contains("\nnum-workers = 3\n"), "{text}");
        assert!(text.contains("\nseed = \"18446744073709551615\"\n"), "{text}");
        assert!(text.contains("\nprogram = [\"./mnist\", \"--lr\", \"0.1\"]\n"), "{text}");
        let again = read("elasticdl train --config FILE", &text).unwrap().all;
        assert_eq!(printed(&again), text);
        let matches = Cli::command().try_get_matches_from(again).unwrap();
        assert!(Cli::from_arg_matches(&matches).is_ok());
    }
}
