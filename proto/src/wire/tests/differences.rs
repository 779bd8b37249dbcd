//! What is sent packed, or as its difference to the one before.

use super::*;

#[test]
fn a_long_list_of_files_is_sent_packed_and_a_short_one_unpacked() {
    let list = |files: u64| {
        FileList::pack((0..files).map(|i| (format!("/a/long/path/to/some/part-{i:080}"), i)))
    };
    let sent = |list: &FileList| {
        let message = WorkerMessage::Described(Ok(list.clone()), None);
        match encode::join_request(JoinRequest::Message(message)).kind {
            Some(Kind::Described(v1::Described {
                outcome: Some(v1::described::Outcome::Dataset(dataset)),
                ..
            })) => dataset,
            other => panic!("{other:?}"),
        }
    };
    let short = list(10);
    assert_eq!((sent(&short).files.len(), sent(&short).packed.len()), (10, 0));
    let long = list(40_000);
    assert!(long.bytes() > 4 << 20);
    let dataset = sent(&long);
    assert!(dataset.files.is_empty() && dataset.packed.len() < 1 << 20);
    let described = |dataset| {
        let outcome = Some(v1::described::Outcome::Dataset(dataset));
        convert(Kind::Described(v1::Described { outcome, order: None })).unwrap()
    };
    assert_eq!(described(dataset), WorkerMessage::Described(Ok(long), None));
    // A list that can't be read is reported as an error of the data set.
    let torn = v1::Dataset { packed: "nonsense".into(), ..v1::Dataset::default() };
    let WorkerMessage::Described(Err(error), None) = described(torn) else {
        panic!("the list was accepted")
    };
    assert!(error.contains("the list of the data set's files can't be used"), "{error}");
}

#[test]
fn a_membership_is_sent_as_its_difference_to_the_one_before_on_the_stream() {
    let of = |generation: u64, ids: std::ops::Range<u64>| {
        let address = |id| SocketAddr::from(([10, 0, 0, 1], 1000 + id as u16));
        let members = ids.map(|id| (WorkerId(id), address(id))).collect();
        let membership = Membership { generation: Generation(generation), members, abort: true };
        SharedMessage::from(MasterMessage::Membership(membership))
    };
    let messages = [of(1, 0..100), of(2, 1..100), of(3, 1..101), of(4, 60..140)];
    let (mut sent, mut received) = (None, Members::default());
    let mut sizes = Vec::new();
    for message in &messages {
        let (mut bytes, shared) = (Vec::new(), JoinResponse::Message(message.clone()));
        shared.clone().encode(&mut sent, &mut bytes);
        sizes.push(bytes.len());
        assert_eq!(JoinResponse::decode(&mut received, &mut &bytes[..]).unwrap(), shared);
    }
    // The last two have too little in common.
    assert!(sizes[0] > 1500 && sizes[1] < 20 && sizes[2] < 50 && sizes[3] > 1000, "{sizes:?}");
    // A stream on which the one before was not sent gets all members.
    let (mut bytes, shared) = (Vec::new(), JoinResponse::Message(messages[2].clone()));
    shared.encode(&mut Some(messages[0].clone()), &mut bytes);
    assert!(bytes.len() > 1500, "{}", bytes.len());
    // A difference to members that the worker does not have is an error that says so.
    let mut bytes = Vec::new();
    let shared = JoinResponse::Message(messages[1].clone());
    shared.encode(&mut Some(messages[0].clone()), &mut bytes);
    let decoded = JoinResponse::decode(&mut Members::default(), &mut &bytes[..]).unwrap();
    assert!(matches!(&decoded, JoinResponse::Invalid(why) if why.contains("left")), "{decoded:?}");
}
