"""Words that common vocabularies hold as one token with the space before them: frequent, short, lower-case ASCII."""

_TEXT = """
    able about above across act action add after again against age ago air all almost alone along already also always
    among amount and animal another answer any appear are area arm army around art ask away baby back bad ball bank
    base be bear beat beautiful became because become bed been before began behind being believe best better between
    big bird black blood blue board boat body book born both box boy break bring brother brought brown build building
    built burn business busy but buy call came can car care carry case cat caught cause cell center century certain
    chair chance change character charge chart check chief child children choose church circle city claim class clean
    clear close clothes cloud coast cold color come common company compare complete condition consider contain control
    cook cool copy corn corner correct cost could count country course cover create cross crowd cry cut dance dark
    daughter day dead deal dear death decide deep degree design desire develop did die differ direct discuss distance
    divide doctor does dog dollar done door double down draw dream dress drink drive drop dry during each ear early
    earth ease east easy eat edge effect egg eight either electric element else end enemy energy engine enough enter
    equal especially even evening event ever every exact example except excite exercise expect experience experiment
    eye face fact fair fall family famous far farm fast fat father favor fear feed feel feet fell felt few field fight
    figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow food foot for
    force forest form forward found four free fresh friend from front fruit full fun game garden gas gather gave
    general gentle get girl give glad glass go gold gone good got govern grand grass gray great green grew ground group
    grow guess guide gun had hair half hand happen happy hard has hat have he head hear heart heat heavy held help her
    here high hill him his history hit hold hole home hope horse hot hour house how huge human hundred ice idea if
    imagine in include indicate industry inside instead interest iron island it job join joy jump just keep key kill
    kind king knew know lady lake land language large last late laugh law lay lead learn least leave led left leg
    length less let letter level lie life lift light like line list listen little live local long look lost lot loud
    love low machine made main major make man many map mark market mass master match material matter may me mean
    measure meat meet men metal method middle might mile milk million mind mine minute miss modern moment money month
    moon more morning most mother motion mountain mouth move much music must my name nation natural nature near
    necessary neck need never new next night nine no noise north nose not note nothing notice number object observe
    ocean of off offer office often oil old on once one only open operate opposite or order original other our out over
    own page paint pair paper part party pass past path pattern pay people perhaps period person phrase pick picture
    piece place plain plan plane plant play please point poor position possible post pound power practice prepare
    present press pretty print problem process produce product property protect provide pull push put quart question
    quick quiet quite race radio rain ran range rather reach read ready real reason receive record red region remember
    repeat reply represent require rest result rich ride right ring rise river road rock roll room root rose round row
    rule run safe said sail salt same sand sat save saw say scale school science sea search season seat second section
    see seed seem segment select self sell send sense sent sentence separate serve set settle seven several shape share
    sharp she ship shoe shop short should shoulder show side sign silent silver similar simple since sing single sister
    sit six size skill skin sky sleep slip slow small smell smile snow so soft soil soldier solution solve some son
    song soon sound south space speak special speech speed spend spoke spot spread spring square stand star start state
    station stay steam steel step stick still stone stood stop store story straight strange stream street strong
    student study subject success such sudden sugar suggest suit summer sun supply support sure surface surprise swim
    symbol system table tail take talk tall teach team teeth tell ten term test than thank that the their them then
    there these they thick thin thing think third this those though thought thousand three through time tiny to
    together told tone too took tool top total touch toward town track trade train travel tree triangle trip trouble
    truck true try tube turn twenty two type under unit until up us use usual valley value vary very view village visit
    voice wait walk wall want war warm was wash watch water wave way we wear weather week weight well went were west
    what wheel when where whether which while white who whole whose why wide wife wild will win wind window winter wire
    wish with woman women wonder wood word work world would write written wrong yard year yellow yes yet you young your
"""

COMMON_WORDS = tuple(_TEXT.split())
