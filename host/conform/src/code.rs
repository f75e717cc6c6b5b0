//! What a check of the validator answers with: name, meaning, what to do. `docs/codes.md` is generated from it.

structures_loader::codes! {
    /// Why a check failed.
    Crashed "conform_crashed": "The process of the check was ended by a signal.",
        "Run the replay line under a debugger; SIGABRT is often a panic that cannot unwind, or an assertion.";
    TimedOut "conform_timed_out": "The process of the check did not end in time and was killed.",
        "Find what it waits for; `--timeout` allows more where the work is really long.";
    Ended "conform_ended": "The process of the check left without an answer.",
        "Something in the library calls `exit`; its messages are in the reason.";
    LeftProcesses "left_processes": "A process that the library started outlived the check; it was killed.",
        "Start no process; a host that unloads nothing cannot end it either.";
    SlowScan "scan_slow": "Describing the plugin in a fresh process takes too long.",
        "Move work out of initialisers and `describe`: every start of every host pays for it.";
    DescribeImpure "describe_impure": "Two answers of `describe` differ.",
        "Make it depend on nothing: no environment, no device, no clock.";
    DescribeUnknown "describe_unknown": "The document names something that the catalog does not have.",
        "Correct the name; `structures catalog show NAME` lists spans, axes, points and symbols.";
    DescribeMalformed "describe_malformed": "A part of the document has no meaning.",
        "Correct it as docs/vendors.md has it.";
    TableDisagrees "table_disagrees": "The tables and the document do not say the same.",
        "Build the library of one version of the API.";
    ExportClash "export_clash": "The library exports a symbol that the host process already has.",
        "Hide everything but the door: `-fvisibility=hidden`, a version script.";
    UniqueSymbol "unique_symbol": "The library exports a symbol of type STB_GNU_UNIQUE.",
        "Build with `-fno-gnu-unique`, or hide it: such a symbol is one for the whole process, whoever else has it.";
    EntryMissing "entry_symbol": "The library exports neither door.",
        "Use the export macro, or export `structures_plugin_v1` from C.";
    LibraryPath "library_path": "A needed library or a search path is relative.",
        "Use absolute paths or `$ORIGIN`; a relative one is looked for in the working directory of the host.";
    TextRelocations "text_relocations": "The library has relocations in its code.",
        "Build it with `-fPIC`.";
    ExecutableStack "executable_stack": "The library asks for an executable stack.",
        "Link with `-z noexecstack`; assembler files need a `.note.GNU-stack` section.";
    PanicAborts "panic_aborts": "The library was built so that a panic ends the process.",
        "Build it with `panic = \"unwind\"`, Cargo's default.";
    NotProbed "probe_says_no": "The plugin's own probe says no to what it declares.",
        "Narrow the declaration, or make the probe agree with it.";
    NotBound "bind_refused": "A form does not bind where it declares that it does.",
        "Narrow the declaration, or serve it.";
    NotRun "call_failed": "A call that should have worked answered an error.",
        "Say no in probe or bind, never in a call.";
    IdAccepted "id_accepted": "Something that does not exist was accepted by name or number.",
        "Compare forms, devices, spans, structures and versions with what you serve, and refuse the rest.";
    ArgumentAccepted "argument_accepted": "Arguments that make no sense were answered with success.",
        "Check them: sizes, ranks, types, nulls. The SDK does it for you; in C it is yours.";
    BandRefused "band_refused": "A size that the band declares was refused.",
        "Narrow the band, or serve it.";
    BandWrong "band_wrong": "At the edge of the band the numbers are wrong, elsewhere they are right.",
        "Look at tails and blocks of the kernel.";
    BandExceeded "band_exceeded": "A size outside of the declared band is served.",
        "Widen the band, or say no in `probe`.";
    LayoutRefused "layout_refused": "A layout that every form must take was refused.",
        "Weights come with any strides; every tensor is aligned to its element and no more.";
    LayoutWrong "layout_wrong": "The same tensor in another layout gives other numbers.",
        "Read by the strides of the view, or refuse it.";
    NonFiniteSpread "non_finite_spread": "A NaN or an infinity came out where the reference has none.",
        "Rows are independent where the structure's are: look for sums and maxima over too much.";
    NonFiniteSwallowed "non_finite_swallowed": "A NaN went in and finite numbers came out.",
        "Comparisons with NaN are false: look at maxima and clamps.";
    Unwritten "output_unwritten": "Elements of an output are as they were before the call.",
        "Write every element: nothing clears an output first.";
    WrittenBeyond "written_beyond": "The call wrote outside of its outputs.",
        "Keep to dims and strides of the view, also in the last block.";
    InputChanged "input_changed": "The call wrote to an input.",
        "Inputs are read-only.";
    Differs "not_deterministic": "The same call gives other bits.",
        "Sum in one order; do not read memory you did not write.";
    Raced "raced": "Calls at the same time give other numbers than one after the other.",
        "Keep what a call writes on its stack or in its instance, or do not declare `concurrent`.";
    Footprint "footprint_wrong": "What an instance says it holds is not what it holds.",
        "Count every buffer that lives as long as the form; scratch counts too.";
    Leaked "leaked": "Binding and releasing again and again takes more and more memory.",
        "Free in `release` what `bind` made.";
    Parity "parity": "The numbers are not the reference's.",
        "Compare with docs/formats.md and the structure's dataflow at the case the reason names.";
    Unjudged "no_case": "Nothing that the form declares can be tried.",
        "A combination of band, variants and spans that exists must be left.";
    Broken "conform_failed": "The validator itself could not do the check.",
        "This is a fault of the program: report it with the message.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_what_to_do() {
        let names: std::collections::BTreeSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Code::ALL.len());
        assert!(Code::ALL
            .iter()
            .all(|c| !c.meaning().is_empty() && !c.help().is_empty()));
    }
}
